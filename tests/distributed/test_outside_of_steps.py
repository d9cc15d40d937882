"""Test that a sharded model can be called outside of steps within ``full_parameters``, and only there."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist import full_parameters
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import GPT
from tests.pool import WorkerPool


class Samples(pl.Callback):
    """Call the model on rank 0 alone at the end of each epoch.

    Args:
        whole: Whether to do so within ``full_parameters``, as documented.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.norms: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        tokens = torch.zeros(1, 8, dtype=torch.long)
        if not self.whole:
            if trainer.is_global_zero:
                pl_module.model(tokens)
            return
        with full_parameters(pl_module):
            if trainer.is_global_zero:
                for _ in range(2):
                    self.norms.append(float(pl_module.model(tokens).norm()))
                assert pl_module.model.head.weight.shape == (32, 20)
                assert type(pl_module.model.head.weight) is nn.Parameter


def sample(layout: str, whole: bool) -> tuple[list[float], Weights, str]:
    torch.manual_seed(0)
    model, samples = GPT(), Samples(whole)
    trainer = make_trainer(layout, max_epochs=2, limit_train_batches=2, callbacks=[samples], precision="64-true")
    try:
        trainer.fit(model)
    except Exception as error:
        return [], {}, f"{type(error).__name__}: {error}"
    return samples.norms, weights_of(model), ""


def test_rank_0_can_call_the_whole_model_within_full_parameters(pool: WorkerPool) -> None:
    norms, weights, _ = pool.run(sample, 1, "auto", True)[0]
    ranks = pool.run(sample, 4, "2x2", True)
    assert len(norms) == 4
    assert ranks[0][0] == pytest.approx(norms, rel=1e-10)
    assert ranks[1][0] == []
    assert_same(ranks[0][1], weights)


def test_calling_a_sharded_model_on_one_rank_raises_at_once(pool: WorkerPool) -> None:
    with pytest.raises(
        AssertionError, match=r"NotInStepError: GPT is sharded, and .* was called outside of a training"
    ):
        pool.run(raise_sample_error, 4, timeout_s=30)


def raise_sample_error() -> None:
    *_, error = sample("2x2", False)
    if error:
        raise RuntimeError(error)


def enter_alone() -> str:
    trainer = make_trainer("full_shard", max_steps=1)
    model = GPT()
    trainer.fit(model)
    if dist.get_rank() == 0:
        try:
            with full_parameters(model, timeout_s=1.0):
                pass
        except Exception as error:
            return str(error)
    return ""


def test_full_parameters_raises_if_only_one_rank_enters_it(pool: WorkerPool) -> None:
    assert "rank 1 did not arrive within 1 s" in pool.run(enter_alone, 2, timeout_s=20)[0]
