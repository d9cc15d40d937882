"""A quiet Trainer for tests, in the layout that a name says."""

from __future__ import annotations

import logging
import os
from typing import Any

import lightning.pytorch as pl

from lightning_dist import FullShardStrategy, HybridShardStrategy

__all__ = ["make_strategy", "make_trainer"]


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
