"""Test that with loss scaling, all ranks skip a step that overflows on one of them, as one process does."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_dist import FullShardStrategy, PipelineParallelStrategy, TensorParallelStrategy
from lightning_dist.parity import whole_parameters
from tests.distributed.fit import make_trainer
from tests.models import GPT, VOCAB, Transformer
from tests.pool import WorkerPool

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

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.before = copies(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        now = copies(pl_module)
        self.has_moved.append(any(not torch.equal(now[name], self.before[name]) for name in now))
        self.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]  # MixedPrecision has one


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in whole_parameters(module).items()}


STRATEGIES: dict[str, Any] = {
    "full_shard": FullShardStrategy,
    "tensor_parallel": lambda: TensorParallelStrategy(
        2, plan={"model.blocks.*.mlp.0": "colwise", "model.blocks.*.mlp.2": "rowwise"}
    ),
    "pipeline_parallel": lambda: PipelineParallelStrategy(2, 2),
}


def train(strategy: str, **kwargs: Any) -> tuple[dict[str, Tensor], Watch]:
    torch.manual_seed(0)
    model, watch = Overflowing(), Watch()
    start = copies(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    make_trainer(
        "auto",
        strategy=STRATEGIES[strategy]() if strategy in STRATEGIES else strategy,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[watch],
        max_steps=NUM_STEPS,
        **kwargs,
    ).fit(model)
    return {name: param - start[name] for name, param in copies(model).items()}, watch


def compare(strategy: str, **kwargs: Any) -> tuple[list[float], list[float], list[bool], float]:
    """Train under a strategy and in one process.

    Returns:
        The scales in one process and under the strategy, whether weights changed in each step, and the difference of
        the final weights relative to the total change of the weights.
    """
    expected, alone = train("auto", devices=1, num_nodes=1, **kwargs)
    found, spread = train(strategy, **kwargs)
    off = sum(float(((found[name] - moved) ** 2).sum()) for name, moved in expected.items())
    return (
        alone.scales,
        spread.scales,
        spread.has_moved,
        (off / sum(float((m**2).sum()) for m in expected.values())) ** 0.5,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_skip_a_step_that_overflows_on_one_of_them(pool: WorkerPool, strategy: str) -> None:
    for alone, spread, has_moved, off in pool.run(compare, 4, strategy, gradient_clip_val=1.0):
        assert spread == alone
        assert [step for step, moved in enumerate(has_moved) if not moved] == list(MARKED)
        assert off < 0.05
