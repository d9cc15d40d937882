"""A quiet Trainer for tests, in the layout that a name says."""

from __future__ import annotations

import logging
import os
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from lightning_dist import FullShardStrategy, HybridShardStrategy
from lightning_dist.parity import assert_parity, whole_parameters

__all__ = ["Weights", "assert_same", "make_strategy", "make_trainer", "refused", "weights_of"]


def make_strategy(layout: str, **kwargs: Any) -> Any:
    """``"auto"``, ``"full_shard"``, or ``"RxS"``: R replicas, each sharded over S ranks."""
    if layout in ("auto", "ddp"):
        return layout
    if layout == "full_shard":
        return FullShardStrategy(**kwargs)
    replicate, shard = map(int, layout.split("x"))
    return HybridShardStrategy(replicate, shard, **kwargs)


def make_trainer(layout: str, strategy_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> pl.Trainer:
    """A Trainer on all ranks of this test; ``kwargs`` as of the Trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["LOCAL_WORLD_SIZE"]),
        "num_nodes": int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
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
    return {name: weight.numpy() for name, weight in whole_parameters(model).items()}


def assert_same(actual: Weights, expected: Weights, tolerance: float = 1e-10, leave_out: Any = ()) -> None:
    assert_parity(
        {name: torch.from_numpy(weight) for name, weight in actual.items()},
        {name: torch.from_numpy(weight) for name, weight in expected.items()},
        tolerance,
        leave_out,
    )


def refused(model: pl.LightningModule, **kwargs: Any) -> str:
    """The error of training ``model``; ``kwargs`` as of :func:`make_trainer`."""
    try:
        make_trainer("2x2", **{"max_steps": 1, **kwargs}).fit(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
