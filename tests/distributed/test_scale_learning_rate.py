"""Learning rates are scaled in the same way under every strategy, wherever optimizers step, and once after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_dist.plugins.callbacks import ScaleLearningRate
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import build
from tests.pool import WorkerPool


def fit(
    layout: str,
    options: dict[str, Any] | None = None,
    base_batch: int = 4,
    max_epochs: int = 2,
    save: Path | None = None,
    resume: Path | None = None,
    **kwargs: Any,
) -> Weights:
    """Train epochs of two global batches of 8 samples, and return the weights."""
    model = build("gpt", **kwargs)
    limits = {"max_epochs": max_epochs, "limit_train_batches": 2}
    callback = ScaleLearningRate(base_batch, warmup_steps=3)
    trainer = make_trainer(layout, options, precision="64-true", callbacks=[callback], **limits)
    trainer.fit(model, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        trainer.strategy.wait_for_checkpoints()
    return weights_of(model)


@pytest.mark.thorough
def test_weights_are_those_of_one_process(pool: WorkerPool) -> None:
    expected, unscaled = pool.run(fit, 1, "auto")[0], pool.run(fit, 1, "auto", base_batch=8)[0]
    with pytest.raises(AssertionError):
        assert_same(unscaled, expected, 1e-3)
    for layout, options in (
        ("2x1", {}),
        ("full_shard", {}),
        ("full_shard", {"optimizer_step": "whole"}),
        ("full_shard", {"offload": "optimizer"}),
    ):
        for weights in pool.run(fit, 2, layout, options):
            assert_same(weights, expected)


def test_a_sharded_run_that_resumes_scales_once(pool: WorkerPool, tmp_path: Path) -> None:
    expected = pool.run(fit, 2, "full_shard")[0]
    pool.run(fit, 2, "full_shard", max_epochs=1, save=tmp_path / "saved")
    for weights in pool.run(fit, 2, "full_shard", resume=tmp_path / "saved"):
        assert_same(weights, expected)


def refusal() -> str:
    try:
        fit("full_shard", {"step_in_backward": True}, optimizer="plain_sgd")
    except Exception as error:
        return str(error)
    return "no error"


def test_updates_in_the_backward_are_refused(pool: WorkerPool) -> None:
    for error in pool.run(refusal, 2):
        assert error.startswith("ScaleLearningRate with step_in_backward=True")
