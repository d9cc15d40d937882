"""Test the stages of ZeRO: what is whole while a step runs, and that all of them compute the same."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_dist import FullShardStrategy
from lightning_dist.parallel_module import parallelized
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import build
from tests.pool import WorkerPool
from tests.thorough import one_in


def fit(zero_stage: int | None) -> tuple[Weights, list[bool], list[bool]]:
    """Train by accumulating gradients of two batches.

    Returns:
        The weights; whether all parameters were whole at the end of each forward; and whether whole gradients were left
        after each first backward of an accumulation.
    """
    whole_parameters, whole_gradients = [], []

    class Watch(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Any) -> None:
            parallel = parallelized(pl_module)
            assert parallel is not None
            whole_parameters.append(all(group.is_gathered for group in parallel.groups if group.unit.kind == "block"))

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            parallel = parallelized(pl_module)
            assert parallel is not None
            if index % 2 == 0:
                blocks = [group for group in parallel.groups if group.unit.kind == "block"]
                whole_gradients.append(any(group.has_unreduced_gradients() for group in blocks))

    strategy = FullShardStrategy(zero_stage=zero_stage)
    trainer = make_trainer(
        "auto", strategy=strategy, max_steps=3, accumulate_grad_batches=2, precision="64-true", callbacks=[Watch()]
    )
    model = build("gpt", optimizer="adamw")
    trainer.fit(model)
    return weights_of(model), whole_parameters, whole_gradients


def in_one_process() -> Weights:
    model = build("gpt", optimizer="adamw")
    make_trainer("auto", max_steps=3, accumulate_grad_batches=2, precision="64-true").fit(model)
    return weights_of(model)


@pytest.mark.parametrize(
    ("zero_stage", "has_whole_parameters", "has_whole_gradients"),
    one_in(2, [(None, False, True), (1, True, True), (2, True, False), (3, False, False)]),
)
def test_each_stage_computes_the_same_as_one_process(
    pool: WorkerPool, zero_stage: int | None, has_whole_parameters: bool, has_whole_gradients: bool
) -> None:
    expected = pool.run(in_one_process, 1)[0]
    for weights, whole_parameters, whole_gradients in pool.run(fit, 4, zero_stage):
        assert whole_parameters == [has_whole_parameters] * 6
        assert whole_gradients == [has_whole_gradients] * 3
        assert_same(weights, expected)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"zero_stage": 4}, "zero_stage=4 must be 1, 2 or 3"),
        ({"zero_stage": 2, "reshard_after_forward": False}, "zero_stage=2 with reshard_after_forward=False"),
    ],
)
def test_other_stages_are_refused(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FullShardStrategy(**kwargs)
