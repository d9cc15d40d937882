"""Compare the predicted peak of a rank's memory with the measured one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

from lightning_dist import DataParallelStrategy, FullShardStrategy
from tests.bench.sides import UnloggedGPT, make_loader, make_module, make_trainer
from tests.bench.workload import Workload
from tests.gpu.check import Found
from tests.gpu.checks.sizes import workload
from tests.gpu.ranks import Ranks

__all__ = ["CONFIGURATIONS", "predicted_memory"]

BOUND = 0.05
"""The largest accepted deviation of the prediction, relative to the measured peak."""

CONFIGURATIONS: dict[str, Any] = {
    "data_parallel": DataParallelStrategy,
    "full_shard": FullShardStrategy,
    "full_shard-zero-2": partial(FullShardStrategy, zero_stage=2),
    "full_shard-checkpointing": partial(FullShardStrategy, activation_checkpointing="full"),
    "full_shard-offload-optimizer": partial(FullShardStrategy, offload="optimizer"),
    "full_shard-offload-both": partial(FullShardStrategy, offload="both"),
}
"""Strategies by the names of checks."""


class Kept(Logger):
    """Keep the last value of each metric."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics |= metrics


def measured(name: str, size: Workload, precision: str) -> dict[str, float]:
    """Train three steps, and return what the report about memory has logged, in MiB."""
    logger = Kept()
    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(CONFIGURATIONS[name](), size, Callback(), max_steps=3, precision=precision)
    trainer.loggers = [logger]
    trainer.fit(make_module(UnloggedGPT, size), make_loader(trainer, size))
    return {name: value for name, value in logger.metrics.items() if name.startswith("memory/")}


def predicted_memory(ranks: Ranks, num_ranks: int, name: str) -> Found:
    """Compare the peaks of a configuration of :data:`CONFIGURATIONS`; on a CPU they are only shown."""
    metrics = ranks.run(measured, num_ranks, name, workload(ranks.machine, "124M"), "32-true")[0]
    predicted, peak = metrics["memory/peak_predicted_mib"], metrics["memory/peak_of_model_mib"]
    ratio = predicted / peak
    details = tuple(f"{key[7:]:<28}{value:>12.1f} MiB" for key, value in sorted(metrics.items()))
    figure = f"predicted {predicted:,.0f} MiB, measured {peak:,.0f} MiB, ratio {ratio:.3f}"
    return Found(figure, abs(ratio - 1) <= BOUND or not ranks.is_cuda, details)
