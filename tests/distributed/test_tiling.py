"""Test steps, evaluations and refusals of MLPs and losses that are computed a few tokens at a time.

That gradients and weights are those of one process is tested in ``tests/parity/test_tiling.py``.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist import ContextParallelStrategy, FullShardStrategy, TensorParallelStrategy
from lightning_dist.parallel_module import parallelized
from lightning_dist.techniques.tiling import Tiling
from tests.distributed.fit import make_trainer, refused
from tests.models import GPT, VOCAB, build
from tests.pool import WorkerPool

BOTH = {"tiled_mlp": 3, "tiled_loss": 3}


def evaluations(options: dict[str, int]) -> tuple[dict[str, float], list[Tensor], tuple[str, ...]]:
    """Fit, validate and predict, and return the metrics, the predictions, and the tiled modules."""
    torch.manual_seed(0)
    model = build("gpt")
    limits = {"max_steps": 2, "limit_val_batches": 2, "limit_predict_batches": 2}
    trainer = make_trainer("auto", strategy=FullShardStrategy(**options), precision="64-true", **limits)
    trainer.fit(model)
    metrics = dict(trainer.validate(model, model.train_dataloader(), verbose=False)[0])
    predictions = trainer.predict(model, model.train_dataloader()) or []
    tiling = parallelized(model).get(Tiling)
    return metrics, list(predictions), () if tiling is None else (*tiling.plan.mlps, *tiling.plan.heads)


def test_evaluations_and_predictions_are_the_same_tile_by_tile(pool: WorkerPool) -> None:
    whole, tiled = (pool.run(evaluations, 2, options)[0] for options in ({}, BOTH))
    assert tiled[0] == pytest.approx(whole[0], rel=1e-12)
    assert all(map(torch.equal, tiled[1], whole[1]))
    assert tiled[2] == ("model.blocks.0.mlp", "model.blocks.1.mlp", "model.head")


class Plain(GPT):
    """Give the logits of the head to the loss without a scale that is a parameter."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


def warnings_of_fit(strategy: str) -> list[str]:
    model = Plain()
    make = {"full_shard": FullShardStrategy, "context_parallel": lambda **kwargs: ContextParallelStrategy(2, **kwargs)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer("auto", strategy=make[strategy](**BOTH), max_steps=2).fit(model)
    return [str(warning.message) for warning in caught if "tiled_loss" in str(warning.message)]


@pytest.mark.parametrize("strategy", ["full_shard", "context_parallel"])
def test_no_hook_of_the_strategy_computes_whole_logits(pool: WorkerPool, strategy: str) -> None:
    assert pool.run(warnings_of_fit, 2, strategy) == [[], []]


class Dropping(GPT):
    """Drop values inside of an MLP, so that a rerun must drop the same ones."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.model.blocks:
            block.mlp.insert(2, nn.Dropout(0.5))


def loss_and_gradient(size: int, change: float) -> tuple[float, float]:
    """Train one step after a weight has changed, and return the loss and the gradient of this weight."""
    torch.manual_seed(0)
    model = Dropping().double()
    weight = model.model.blocks[0].mlp[0].weight
    with torch.no_grad():
        weight[0, 0] += change
    gradients: list[Tensor] = []

    class Observed(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            torch.manual_seed(1)

        def on_before_optimizer_step(self, *args: Any) -> None:
            gradients.append(model.model.blocks[0].mlp[0].weight.grad.full_tensor()[0, 0])

    strategy = FullShardStrategy(tiled_mlp=size)
    trainer = make_trainer("auto", strategy=strategy, max_steps=1, precision="64-true", callbacks=[Observed()])
    trainer.fit(model)
    return float(trainer.callback_metrics["train/loss"]), float(gradients[0])


def gradient_by_differences(size: int) -> tuple[float, float]:
    """Return a gradient from the backward, and from the difference of two losses."""
    gradient = loss_and_gradient(size, 0.0)[1]
    higher, lower = (loss_and_gradient(size, change)[0] for change in (1e-5, -1e-5))
    return gradient, (higher - lower) / 2e-5


def test_dropout_in_a_tile_drops_the_same_values_in_the_backward(pool: WorkerPool) -> None:
    derivative, by_difference = pool.run(gradient_by_differences, 2, 3)[0]
    assert derivative == pytest.approx(by_difference, rel=1e-5)
    assert abs(derivative) > 1e-6


class WithoutLogits(GPT):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model(batch[0]).square().mean()


class SumOfHeads(GPT):
    """Add the logits of several layers, so that no part of the loss has those of a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.further = nn.ModuleDict({name: nn.Linear(VOCAB, VOCAB) for name in ("d", "a", "c", "b")})

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = self.model(batch[0])
        total = sum(head(logits) for head in self.further.values())
        return functional.cross_entropy(total.flatten(0, 1), batch[1].flatten())


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "several_heads": (
        SumOfHeads,
        lambda: FullShardStrategy(tiled_loss=4),
        "tiled_loss=4 has no effect: the logits of further.a, further.b, further.c, further.d were used by",
    ),
    "tp": (
        lambda: build("gpt"),
        lambda: TensorParallelStrategy(2, tiled_mlp=4),
        r"tensor_parallel with tiled_mlp=4 and tp_size=2: .* Use tp_size=1, or leave tiled_mlp out",
    ),
    "no_loss": (
        WithoutLogits,
        lambda: FullShardStrategy(tiled_loss=4),
        "tiled_loss=4 .* F.cross_entropy is not given the output of a layer. Leave tiled_loss out",
    ),
    "layers_without_a_module": (
        lambda: build("encoder"),
        lambda: FullShardStrategy(tiled_mlp=2),
        r"tiled_mlp=2: \w+ has no module in its blocks that computes several layers token by token",
    ),
    "no_blocks": (
        lambda: build("gan"),
        lambda: FullShardStrategy(tiled_mlp=2),
        r"tiled_mlp=2: \w+ has no blocks, which are modules of one class that a list repeats .* units=\[",
    ),
}


def refuse(name: str) -> str:
    make_model, make_strategy, _ = REFUSED[name]
    return refused(make_model(), strategy=make_strategy(), max_steps=1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tiled_is_refused_with_the_fix(pool: WorkerPool, name: str) -> None:
    for text in pool.run(refuse, 2, name):
        assert re.search(REFUSED[name][2], text), text
