"""Test models in which code sees only a part of the sequence, or an MLP a tile of it, against one process.

Each case must have the weights of one process, or be refused by a sentence that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist import ContextParallelStrategy, DataParallelStrategy
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import GPT, VOCAB, TestModule
from tests.pool import WorkerPool
from tests.thorough import one_in

WIDTH = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(2 * WIDTH))
        self.kept: list[Tensor] = []

    def change(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.change(self.up(x))))


class Block(nn.Module):
    def __init__(self, mlp: type[MLP]) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(TestModule):
    mlp: type[MLP] = MLP
    data = GPT.data

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(self.mlp) for _ in range(3))
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, batch: Any) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.logits(batch).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def with_mlp(name: str, change: Callable[[Any, Tensor], Tensor], loss: Any = None) -> type[Model]:
    """Make a model whose MLPs change their hidden features, and whose loss has a further term."""
    mlp = type(name, (MLP,), {"change": change})
    body: dict[str, Any] = {"mlp": mlp}
    if loss is not None:
        body["training_step"] = loss
    return type(name, (Model,), body)


# Statistics of all tokens, in training mode only


def centred(self: Any, hidden: Tensor) -> Tensor:
    return hidden - (hidden.mean((0, 1)) if self.training else self.seen)


def scaled(self: Any, hidden: Tensor) -> Tensor:
    return hidden / hidden.detach().std() if self.training else hidden


class Normed(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(2 * WIDTH)

    def change(self, hidden: Tensor) -> Tensor:
        return self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2)


class BatchNormInMLP(Model):
    mlp = Normed


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class BatchNormAfterBlocks(Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = Transposed()


# Buffers that an MLP updates


def counting(self: Any, hidden: Tensor) -> Tensor:
    if self.training:
        self.seen += 1
    return hidden * (1 + 0.01 * self.seen)


def averaging(self: Any, hidden: Tensor) -> Tensor:
    if self.training:
        self.seen.lerp_(hidden.detach().mean((0, 1)), 0.1)
    return hidden


def highest(self: Any, hidden: Tensor) -> Tensor:
    self.seen.copy_(torch.maximum(self.seen, hidden.detach().amax((0, 1))))
    return hidden


# Values that leave an MLP by another way than its output


def keeping(self: Any, hidden: Tensor) -> Tensor:
    self.auxiliary = hidden.softmax(-1).mean((0, 1)).square().sum()
    return hidden


def linear_auxiliary(self: Any, hidden: Tensor) -> Tensor:
    self.auxiliary = hidden.mean()
    return hidden


def listing(self: Any, hidden: Tensor) -> Tensor:
    self.kept.append(hidden.square().mean())
    return hidden


def add_auxiliary(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss(batch) + 0.1 * sum(block.mlp.auxiliary for block in self.blocks)


def log_auxiliary(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss(batch)
    self.log("auxiliary", self.blocks[1].mlp.auxiliary)
    return loss


def add_listed(self: Any, batch: Any, batch_idx: int) -> Tensor:
    for block in self.blocks:
        block.mlp.kept.clear()
    return self.loss(batch) + sum(block.mlp.kept[0] for block in self.blocks)


# Hooks


class Penalty(Model):
    """Add what hooks on layers inside of MLPs keep to the loss."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kept: list[Tensor] = []
        for block in self.blocks:
            block.mlp.up.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.clear()
        return self.loss(batch) + 0.1 * sum(output.square().mean() for output in self.kept)


class Probe(Model):
    """Look at the activations of a layer inside of an MLP, without using them in the step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shapes: list[Any] = []
        self.blocks[1].mlp.down.register_forward_pre_hook(lambda module, args: self.shapes.append(args[0].shape[:2]))


class ProbeOfBlock(Probe):
    def __init__(self, **kwargs: Any) -> None:
        Model.__init__(self, **kwargs)
        self.shapes = []
        self.blocks[1].register_forward_hook(lambda module, args, output: self.shapes.append(output.shape[:2]))


class LateProbe(Probe):
    """Register the hook when the training begins."""

    def __init__(self, **kwargs: Any) -> None:
        Model.__init__(self, **kwargs)
        self.shapes = []

    def on_train_start(self) -> None:
        self.blocks[1].mlp.down.register_forward_pre_hook(lambda module, args: self.shapes.append(args[0].shape[:2]))


class OldWeightNorm(Model):
    """Have hooks of torch, which look at weights only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with warnings.catch_warnings(action="ignore"):
            for block in self.blocks:
                nn.utils.weight_norm(block.mlp.up)


# Logits


class ZLoss(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return loss + 0.1 * torch.logsumexp(logits, -1).square().mean()


class Distillation(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        teacher = functional.one_hot(batch[1], VOCAB).to(logits.dtype) * 0.9 + 0.1 / VOCAB
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return loss + functional.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")


DIFFERS = "in training mode, its results differ"
HOOK = "has a hook, which each rank would call"
HOOK_INSIDE = ".mlp.up, which would be called for each tile"
NOT_RETURNED = "computes but does not return"
USES = "computes a value that it does not return"
BUFFER = "it changes the buffer 'mlp.seen' to other values"
BUFFER_OF_MLP = "it changes the buffer 'seen' to other values"

MODELS: dict[str, tuple[type[Model], str, str]] = {
    "centred": (with_mlp("Centred", centred), DIFFERS, DIFFERS),
    "scaled": (with_mlp("Scaled", scaled), DIFFERS, DIFFERS),
    "batch norm": (BatchNormInMLP, "has a norm whose statistics are", "in training mode, it changes the buffer"),
    "batch norm after blocks": (BatchNormAfterBlocks, "", ""),
    "counting": (with_mlp("Counting", counting), "", f"in training mode, {BUFFER_OF_MLP}"),
    "averaging": (with_mlp("Averaging", averaging), BUFFER, BUFFER_OF_MLP),
    "highest": (with_mlp("Highest", highest), BUFFER, ""),
    "auxiliary": (with_mlp("Auxiliary", keeping, add_auxiliary), NOT_RETURNED, USES),
    "linear auxiliary": (with_mlp("Linear", linear_auxiliary, add_auxiliary), NOT_RETURNED, USES),
    "logged": (with_mlp("Logged", linear_auxiliary, log_auxiliary), "self.log('auxiliary')", ""),
    "listed": (with_mlp("Listed", listing, add_listed), NOT_RETURNED, USES),
    "penalty": (Penalty, NOT_RETURNED, HOOK_INSIDE),
    "probe": (Probe, f"blocks.1.mlp.down {HOOK}", ""),
    "probe of a block": (ProbeOfBlock, f"blocks.1 {HOOK}", ""),
    "late probe": (LateProbe, f"blocks.1.mlp.down {HOOK}", ""),
    "old weight norm": (OldWeightNorm, "could not be tried", "could not be tried"),
    "z-loss": (ZLoss, "", ""),
    "distillation": (Distillation, "", ""),
}
"""For each model, what the refusals under context parallelism and of tiled MLPs say; empty: it trains as elsewhere."""

STRATEGIES: dict[str, Callable[[], Any]] = {
    "cp": lambda: ContextParallelStrategy(2),
    "cp, tiled loss": lambda: ContextParallelStrategy(2, tiled_loss=3),
    "tiled": lambda: DataParallelStrategy(tiled_mlp=3, tiled_loss=3),
}


def fit(name: str, strategy: str | None) -> tuple[Weights, Any, str]:
    """Train, and return the weights with the buffers, what hooks have seen, and the error."""
    torch.manual_seed(0)
    model = MODELS[name][0](optimizer="sgd")
    make = (lambda: "auto") if strategy is None else STRATEGIES[strategy]
    with warnings.catch_warnings(action="ignore"):
        trainer: pl.Trainer = make_trainer("auto", strategy=make(), max_steps=3, precision="64-true")
        try:
            trainer.fit(model)
        except ValueError as error:
            return {}, [], str(error)
    buffers = {name: buffer.double().numpy() for name, buffer in model.named_buffers()}
    return weights_of(model) | buffers, getattr(model, "shapes", []), ""


def fit_all(strategy: str | None) -> dict[str, tuple[Weights, Any, str]]:
    return {name: fit(name, strategy) for name in MODELS}


@pytest.fixture(scope="module")
def in_one_process(reference_pool: WorkerPool) -> dict[str, tuple[Weights, Any, str]]:
    result: dict[str, tuple[Weights, Any, str]] = reference_pool.run(fit_all, 1, None)[0]
    return result


@pytest.mark.parametrize("strategy", one_in(2, STRATEGIES))
def test_the_whole_sequence_is_seen_or_the_model_is_refused(
    strategy: str, pool: WorkerPool, in_one_process: dict[str, tuple[Weights, Any, str]]
) -> None:
    num_ranks = 1 if strategy == "tiled" else 2
    for results in pool.run(fit_all, num_ranks, strategy):
        for name, (_, *refusals) in MODELS.items():
            expected = refusals[strategy == "tiled"]
            weights, seen, error = results[name]
            if expected:
                assert expected in error, (name, error)
            else:
                assert not error, (name, error)
                assert_same(weights, in_one_process[name][0])
                assert seen == in_one_process[name][1], name
