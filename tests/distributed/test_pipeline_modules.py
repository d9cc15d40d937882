"""Test that modules and batches of all kinds train in a pipeline as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_dist import PipelineParallelStrategy
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import VOCAB, Transformer
from tests.pipeline_models import DeepGPT, Dropout, ResNet
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in


class Varying(DeepGPT):
    """Train on batches whose size and length change from step to step."""

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((8, 8), (8, 5), (8, 8), (6, 7), (4, 8), (5, 3))
        tokens = [torch.randint(VOCAB, (size, length + 1), generator=generator) for size, length in shapes]
        return DataLoader([(t[:, :-1], t[:, 1:]) for t in tokens], batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.model.embedding(tokens) + self.model.position[: tokens.shape[1]]
        for block in self.model.blocks:
            x = block(x)
        return functional.cross_entropy(self.model.head(self.model.norm(x)).flatten(0, 1), targets.flatten())


class Frozen(DeepGPT):
    """Freeze all parameters of the first stage."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model.head.weight = nn.Parameter(self.model.head.weight.detach().clone())
        for name, param in self.model.named_parameters():
            if name.startswith(("embedding", "position", *(f"blocks.{index}." for index in range(5)))):
                param.requires_grad_(False)


class Nested(DeepGPT):
    """Train on nested batches, which the step changes in place; weight the loss, and count samples in an attribute."""

    count = 0

    def train_dataloader(self) -> DataLoader[Any]:
        tokens, targets = self.data()
        batches = [slice(8 * index, 8 * index + 8) for index in range(6)]
        return DataLoader(
            [{"ids": tokens[b].clone(), "rest": (targets[b], ["text"] * 8)} for b in batches], batch_size=None
        )

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        batch["ids"][:, 0] += 1
        batch["ids"] %= VOCAB
        targets, texts = batch["rest"]
        self.count += len(texts)
        return {"loss": self.loss((batch["ids"], targets)), "weight": float(batch["ids"].numel())}


class Averaged(DeepGPT):
    def configure_callbacks(self) -> Any:
        return WeightAveraging()


def halve(module: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(0.5)


class HookedLate(Callback):
    """Keep the output of a block by a hook that is registered after the model was cut into stages."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def take(module: nn.Module, args: Any, output: Tensor) -> None:
            pl_module.taken = output

        pl_module.model.blocks[1].register_forward_hook(take)  # type: ignore[union-attr]  # it has blocks


class Roundabout(DeepGPT):
    """Let outputs of modules reach the loss in indirect ways: as a Python number, through a view, and by a hook.

    Hooks change the output of a block, and torch's function clips the gradients of all parameters.
    """

    taken: Tensor | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model.blocks[3].register_forward_hook(halve)  # This is the last block of the first stage.
        self.model.blocks[3].register_forward_hook(lambda module, args, output: output * 1.5)

    def configure_callbacks(self) -> Any:
        return HookedLate()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        gain = self.model.embedding(torch.arange(4)).square().mean().item()
        x = self.model.embedding(batch[0]) + self.model.position
        kept = torch.zeros_like(x)
        for index, block in enumerate(self.model.blocks):
            x = block(x)
            if index == 2:
                kept[:, :3].add_(x[:, :3])
        penalty = 0.0 if self.taken is None else self.taken.square().mean()  # It is None until a hook is registered.
        self.taken = None
        logits = self.model.head(self.model.norm(x + kept))
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) * (1 + gain) + 0.1 * penalty

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05, norm_type=3.0)


MODULES: list[tuple[type[DeepGPT], dict[str, Any], dict[str, Any]]] = [
    (Varying, {}, {}),
    (Frozen, {}, {}),
    (Nested, {"accumulate_grad_batches": 2}, {}),
    (Averaged, {}, {}),
    (Roundabout, {}, {}),
    (DeepGPT, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {"check_replicas_every_n_steps": 1}),
    (DeepGPT, {"gradient_clip_val": 0.5}, {"split": ["blocks.2"], "activation_checkpointing": True}),
]


def trained(cls: type[DeepGPT], of_trainer: dict[str, Any], of_strategy: dict[str, Any], in_stages: bool) -> Any:
    torch.manual_seed(0)
    model = cls()
    strategy = PipelineParallelStrategy(num_microbatches=4, **of_strategy) if in_stages else "auto"
    limits = {"max_steps": 6 // of_trainer.get("accumulate_grad_batches", 1), "precision": "64-true"}
    make_trainer("auto", strategy=strategy, **limits, **of_trainer).fit(model)
    return weights_of(model), getattr(model, "count", None)


@pytest.mark.parametrize(("cls", "of_trainer", "of_strategy"), one_in(4, MODULES))
def test_trains_as_in_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, cls: Any, of_trainer: Any, of_strategy: Any
) -> None:
    ranks, ((expected, count),) = in_parallel(
        lambda: pool.run(trained, 2, cls, of_trainer, of_strategy, True),
        lambda: reference_pool.run(trained, 1, cls, of_trainer, {}, False),
    )
    for weights, found in ranks:
        assert_same(weights, expected, 1e-7 if cls is Averaged else 1e-10)  # torch averages in float32.
        assert found == count


class Meta(DeepGPT):
    """Build the model in configure_model, on the meta device."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Transformer(num_layers=8)


def materialized() -> tuple[Weights, int, int]:
    """Train, and return the weights, the number of parameter elements on this rank, and the number of all."""
    model = Meta()
    make_trainer("auto", strategy=PipelineParallelStrategy(num_microbatches=4), max_steps=2).fit(model)
    own = sum(param.numel() for param in model.parameters() if not param.is_meta)
    return weights_of(model), own, sum(param.numel() for param in model.parameters())


def test_each_rank_materializes_only_its_own_stages(pool: WorkerPool) -> None:
    for weights, own, whole in pool.run(materialized, 2):
        assert own < 0.6 * whole
        assert all(weight.std() > 0 for name, weight in weights.items() if name.endswith("qkv.weight"))


class Recomputing(Dropout):
    """Recompute the blocks in the backward by torch's checkpointing, with the dropout of the forward."""

    is_on = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.model.embedding(batch[0]) + self.model.position
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_on else block(x)
        return functional.cross_entropy(self.model.head(self.model.norm(x)).flatten(0, 1), batch[1].flatten())


class Keeping(Recomputing):
    is_on = False


def dropped(cls: type[Dropout], schedule: str) -> Weights:
    torch.manual_seed(0)
    model = cls()
    strategy = PipelineParallelStrategy(num_microbatches=4, schedule=schedule)
    make_trainer("auto", strategy=strategy, max_steps=3, precision="64-true").fit(model)
    return weights_of(model)


@pytest.mark.parametrize("schedule", one_in(2, ["1f1b", "interleaved_1f1b"]))
def test_a_recomputed_block_has_the_same_dropout(pool: WorkerPool, schedule: str) -> None:
    expected = pool.run(dropped, 2, Keeping, schedule)[0]
    for weights in pool.run(dropped, 2, Recomputing, schedule):
        assert_same(weights, expected)


class Viewing(DeepGPT):
    """Use blocks that return views, some of them not contiguous, and use the embedding again at the end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        embedded = self.model.embedding(batch[0])
        x = embedded + self.model.position
        for block in self.model.blocks:
            x = block(x)
        return functional.cross_entropy(self.model.head(x + embedded).flatten(0, 1), batch[1].flatten())


class View(nn.Module):
    def __init__(self, block: nn.Module, turns: bool) -> None:
        super().__init__()
        self.block, self.turns = block, turns

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        return out.transpose(1, 2).contiguous().transpose(1, 2) if self.turns else out.view(*out.shape)


def viewed(in_stages: bool) -> Weights:
    torch.manual_seed(0)
    model = Viewing()
    model.model.blocks = nn.ModuleList(View(block, index % 2 == 0) for index, block in enumerate(model.model.blocks))
    strategy = PipelineParallelStrategy(num_microbatches=4, schedule="zbv") if in_stages else "auto"
    make_trainer("auto", strategy=strategy, max_steps=3, precision="64-true").fit(model)
    return weights_of(model)


def test_views_are_sent_between_stages(pool: WorkerPool) -> None:
    expected = pool.run(viewed, 1, False)[0]
    for weights in pool.run(viewed, 2, True):
        assert_same(weights, expected)


class Buffers(Callback):
    """Record after each validation whether this rank's buffers are those of the training step before."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.kept = {name: buffer.clone() for name, buffer in pl_module.named_buffers() if not buffer.is_meta}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        buffers = dict(pl_module.named_buffers())
        self.found.append(all(torch.equal(buffers[name], buffer) for name, buffer in self.kept.items()))


class Normed(ResNet):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", functional.cross_entropy(self.model(batch[0]), batch[1]))


def validated() -> tuple[list[bool], int]:
    buffers = Buffers()
    options = {"max_steps": 3, "limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
    strategy = PipelineParallelStrategy(num_microbatches=4)
    make_trainer("auto", strategy=strategy, callbacks=[buffers], **options).fit(Normed())
    return buffers.found, len(buffers.kept)


def test_validation_does_not_change_the_buffers_of_any_stage(pool: WorkerPool) -> None:
    for found, number in pool.run(validated, 2):
        assert len(found) >= 2
        assert all(found)
        assert number
