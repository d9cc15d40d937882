"""Make Trainers that print nothing, and compare the weights after a fit."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from lightning_dist import FullShardStrategy, HybridShardStrategy, NDParallelStrategy
from lightning_dist.run.parity import assert_parity, whole_parameters
from tests.accelerator import place

__all__ = ["Weights", "assert_same", "make_strategy", "make_trainer", "refused", "weights_of"]


def make_strategy(layout: str, **kwargs: Any) -> Any:
    """Make the strategy of a layout.

    Args:
        layout: ``"auto"``, ``"ddp"``, ``"full_shard"``, or ``"RxS"``: R replicas, each sharded over S ranks; or
            ``"ppP-R"`` or ``"tpT-R"``: R replicas of P stages, or of T ranks that split layers.
        kwargs: Further arguments of the strategy.
    """
    if layout in ("auto", "ddp"):
        return layout
    if layout == "full_shard":
        return FullShardStrategy(**kwargs)
    if "-" in layout:
        axis, replicas = layout.split("-")
        if axis[:2] == "tp":
            kwargs = {"strict_plan": False, **kwargs}  # Of some models of the tests, nothing can be split.
        return NDParallelStrategy(**{f"{axis[:2]}_size": int(axis[2:])}, dp_replicate_size=int(replicas), **kwargs)
    replicate, shard = map(int, layout.split("x"))
    return HybridShardStrategy(replicate, shard, **kwargs)


def make_trainer(layout: str, strategy_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> pl.Trainer:
    """Make a Trainer on all ranks of this test, which prints, logs and saves nothing.

    Args:
        layout: Layout of :func:`make_strategy`.
        strategy_kwargs: Further arguments of :func:`make_strategy`.
        kwargs: Arguments of the Trainer, which override the defaults.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = {
        **place(),
        "strategy": make_strategy(layout, **(strategy_kwargs or {})),
        "use_distributed_sampler": False,
        "max_epochs": -1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **kwargs})


Weights = dict[str, np.ndarray]


def weights_of(model: nn.Module) -> Weights:
    """Return the whole parameters of a model by name. This is a collective."""
    return {name: weight.numpy() for name, weight in whole_parameters(model).items()}


def assert_same(actual: Weights, expected: Weights, tolerance: float = 1e-10, leave_out: Any = ()) -> None:
    """Assert that weights are equal up to relative errors of ``tolerance``, except those named in ``leave_out``."""
    assert_parity(
        {name: torch.from_numpy(weight) for name, weight in actual.items()},
        {name: torch.from_numpy(weight) for name, weight in expected.items()},
        tolerance,
        leave_out,
    )


def refused(model: pl.LightningModule, **kwargs: Any) -> str:
    """Return the error that training ``model`` raises, or ``"no error"``; ``kwargs`` are those of the Trainer."""
    try:
        make_trainer("2x2", **{"max_steps": 1, **kwargs}).fit(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
