"""Compute the metrics of a run from the figures of its ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

__all__ = ["RankFigures", "gather", "num_replicas", "summarize"]

_MAX_RANKS_LISTED = 64


@dataclass
class RankFigures:
    """Hold what a rank has measured in an interval. A time is that of all steps together, in seconds; NaN: unknown."""

    seconds: float
    data: float
    forward: float
    backward: float
    optimizer: float
    waits: float
    samples: float
    tokens: float
    peak_mib: float
    bubble: float
    model_tflop: float
    """Operations that the model needs, in units of 1e12."""
    hardware_tflop: float
    """Operations that the device has run, in units of 1e12."""
    peak_tflops: float
    """Operations that the device can run per second at most, in units of 1e12."""


def gather(
    own: RankFigures, others: Sequence[float], device: torch.device
) -> tuple[list[RankFigures], list[list[float]]]:
    """Return the figures of every rank, indexed by rank. This is a collective over all processes.

    Args:
        own: The figures of this rank.
        others: Further figures of this rank, as many as on every rank.
        device: Device of the tensors that are sent.
    """
    num_own = len(fields(RankFigures))
    gathered = _gather([*astuple(own), *others], device)
    return [RankFigures(*rank[:num_own]) for rank in gathered], [rank[num_own:] for rank in gathered]


def _gather(values: list[float], device: torch.device) -> list[list[float]]:
    mine = torch.tensor(values, device=device)
    if not (dist.is_available() and dist.is_initialized()):
        return [mine.tolist()]
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    gathered: list[list[float]] = torch.stack(ranks).tolist()
    return gathered


def summarize(ranks: Sequence[RankFigures], num_steps: int, num_replicas: int) -> dict[str, float]:
    """Return the metrics of the run, by name.

    Args:
        ranks: The figures of every rank.
        num_steps: Number of optimizer steps in the interval.
        num_replicas: Number of parts into which the global batch is divided. Ranks with the same part, under tensor or
            pipeline parallelism, report the same samples and tokens, which count once.
    """
    slowest = max(rank.seconds for rank in ranks)
    metrics = {"perf/step_ms": 1000 * slowest / num_steps, "memory/peak_mib": max(rank.peak_mib for rank in ranks)}
    for phase in ("data", "forward", "backward", "optimizer"):
        metrics[f"perf/{phase}_ms"] = 1000 * fmean(getattr(rank, phase) for rank in ranks) / num_steps
    share = num_replicas / len(ranks)
    for name in ("samples", "tokens"):
        if number := sum(getattr(rank, name) for rank in ranks):
            metrics[f"perf/{name}_per_s"] = share * number / slowest
    peak = slowest * sum(rank.peak_tflops for rank in ranks)
    if peak > 0:  # It is NaN if operations could not be counted.
        metrics["perf/mfu"] = sum(rank.model_tflop for rank in ranks) / peak
        metrics["perf/hfu"] = sum(rank.hardware_tflop for rank in ranks) / peak
        metrics["perf/peak_tflops"] = fmean(rank.peak_tflops for rank in ranks)
    if not any(math.isnan(rank.waits) for rank in ranks):
        metrics |= _compare(ranks, num_steps)
    if 1 < len(ranks) <= _MAX_RANKS_LISTED:
        metrics |= {f"memory/peak_mib_rank{rank}": figures.peak_mib for rank, figures in enumerate(ranks)}
    if not any(math.isnan(rank.bubble) for rank in ranks):
        metrics["perf/bubble"] = fmean(rank.bubble for rank in ranks)
    return metrics


def _compare(ranks: Sequence[RankFigures], num_steps: int) -> dict[str, float]:
    """Return how long ranks waited for each other, and which one the others waited for.

    Ranks that synchronize in every step all take equally long. The one that holds up the others is the one that waits
    least.
    """
    busy = [1000 * (rank.seconds - rank.waits) / num_steps for rank in ranks]
    return {
        "perf/exposed_comm_ms": 1000 * fmean(rank.waits for rank in ranks) / num_steps,
        "perf/slowest_rank": float(busy.index(max(busy))),
        "perf/busy_ms_slowest_rank": max(busy),
        "perf/busy_ms_fastest_rank": min(busy),
    }


def num_replicas(trainer: Trainer) -> int:
    """Return the number of parts into which the global batch is divided."""
    kwargs: dict[str, Any] = trainer.distributed_sampler_kwargs or {}
    return int(kwargs.get("num_replicas", trainer.world_size))
