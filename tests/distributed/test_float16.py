"""Test that with loss scaling, all ranks skip a step that overflows on one of them, as one process does."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_dist import FullShardStrategy, MeshPrecision, PipelineParallelStrategy, TensorParallelStrategy
from lightning_dist.run.parity import whole_parameters
from tests.accelerator import on_gpu
from tests.distributed.fit import make_trainer
from tests.models import GPT, VOCAB, Transformer
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

MARKER = VOCAB - 1
MARKED = {1: 3, 4: 6}
"""A mapping of steps to the index of the sample in the global batch that has the marker."""
NUM_STEPS = 7


class InfiniteGradient(torch.autograd.Function):
    """Return the input, and make its gradient infinite if there is a marker among the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        return torch.where((tokens == MARKER).any(), float("inf"), gradients[0]), None


class Embedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return InfiniteGradient.apply(super().forward(tokens), tokens)


class Overflowing(GPT):
    """Train on tokens with markers, which make the gradients of the embedding infinite, and of no other layer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = Transformer(num_layers=4, tied=False)
        self.model.embedding = Embedding(VOCAB, 20)

    def data(self) -> tuple[Tensor, ...]:
        tokens, targets = (part % MARKER for part in super().data())
        for step, sample in MARKED.items():
            tokens[8 * step + sample, 0] = MARKER
        return tokens, targets


class Watch(pl.Callback):
    """Record after each batch the scale of the loss, and whether any weight changed."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.has_moved: list[bool] = []
        self.before: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before = copies(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        now = copies(pl_module)
        self.has_moved.append(any(not torch.equal(now[name], self.before[name]) for name in now))
        self.before = now
        self.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]  # MixedPrecision has one


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in whole_parameters(module).items()}


STRATEGIES: dict[str, Any] = {
    "full_shard": FullShardStrategy,
    "tensor_parallel": lambda: TensorParallelStrategy(
        2, plan={"model.blocks.*.mlp.0": "colwise", "model.blocks.*.mlp.2": "rowwise"}
    ),
    "pipeline_parallel": lambda: PipelineParallelStrategy(2, num_microbatches=2),
}


def train(strategy: str, is_mesh: bool = False, **kwargs: Any) -> tuple[dict[str, Tensor], list[float], list[bool]]:
    """Train, and return the changes of the weights, and for each step the scale and whether any weight changed.

    Args:
        strategy: Key of ``STRATEGIES``, or a strategy of Lightning.
        is_mesh: Whether float16 is asked for by MeshPrecision, and not by Lightning's plugin.
        kwargs: Arguments of the Trainer.
    """
    torch.manual_seed(0)
    model, watch = Overflowing(), Watch()
    start = copies(model)
    device = "cuda" if on_gpu() else "cpu"
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    own = MeshPrecision(param_dtype="float16")
    trainer = make_trainer(
        "auto",
        strategy=STRATEGIES[strategy]() if strategy in STRATEGIES else strategy,
        plugins=[own if is_mesh else MixedPrecision("16-mixed", device, scaler)],
        callbacks=[watch],
        max_steps=NUM_STEPS,
        **kwargs,
    )
    if is_mesh:
        assert own.scaler is not None
        own.scaler.load_state_dict(scaler.state_dict())
    trainer.fit(model)
    changes = {name: param - start[name] for name, param in copies(model).items()}
    return changes, watch.scales, watch.has_moved


@functools.cache
def alone(pool: WorkerPool) -> tuple[dict[str, Tensor], list[float], list[bool]]:
    changes, scales, has_moved = pool.run(train, 1, "auto", gradient_clip_val=1.0)[0]
    return changes, scales, has_moved


@pytest.mark.parametrize(
    ("strategy", "is_mesh"),
    one_in(6, [*((name, False) for name in STRATEGIES), ("full_shard", True), ("data_parallel", True)]),
)
def test_all_ranks_skip_a_step_that_overflows_on_one_of_them(
    pool: WorkerPool, reference_pool: WorkerPool, strategy: str, is_mesh: bool
) -> None:
    ranks, (expected, scales, _) = in_parallel(
        lambda: pool.run(train, 4, strategy, is_mesh, gradient_clip_val=1.0), lambda: alone(reference_pool)
    )
    total = sum(float((change**2).sum()) for change in expected.values())
    for changes, found, has_moved in ranks:
        assert found == scales
        assert [step for step, moved in enumerate(has_moved) if not moved] == list(MARKED)
        off = sum(float(((changes[name] - change) ** 2).sum()) for name, change in expected.items())
        assert (off / total) ** 0.5 < 0.05
