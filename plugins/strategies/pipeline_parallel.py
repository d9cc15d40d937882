"""Provide ``strategy="pipeline_parallel"``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.techniques.pipeline import PipelineConfig

__all__ = ["PipelineParallelStrategy"]


class PipelineParallelStrategy(MeshStrategy):
    """Cut a model into stages on different devices, and pass the microbatches of a batch through them.

    The user's module and its steps are not changed. The ranks of one pipeline have the same part of the batch.

    Args:
        pp_size: Number of processes that the stages are distributed over. None: the number of devices of a node, or,
            if ``dp_shard_size`` is given, the number of processes divided by the other sizes.
        num_microbatches: Number of microbatches that a rank's part of the batch is split into. None: the greatest
            number up to 4 per stage that divides the samples, and leaves BatchNorm at least two samples.
        schedule: Name of the pipeline's schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``looped_bfs``,
            ``interleaved_zero_bubble``, ``zbv`` or ``dualpipev``.
        virtual_stages: Number of stages on a process. None: 1, or 2 for a schedule that needs several.
        split: Names of the modules that each stage but the first begins with, such as ``[layers.4, layers.9]``. None:
            stages are balanced by cost.
        dp_shard_size: Number of processes that a stage and the batch are sharded over. None: the number of processes
            divided by the other sizes.
        dp_replicate_size: Number of replicas. None: 1.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.

    Raises:
        ValueError: If ``schedule`` is unknown, ``num_microbatches`` is less than 1, or ``virtual_stages`` does not fit
            the schedule.
    """

    strategy_name = "pipeline_parallel"

    def __init__(
        self,
        pp_size: int | None = None,
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        virtual_stages: int | None = None,
        split: Sequence[str] | None = None,
        dp_shard_size: int | None = None,
        dp_replicate_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if num_microbatches is not None and num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches} must be at least 1.")
        pipeline = PipelineConfig(1, schedule, virtual_stages, num_microbatches or 0, split)
        self._config = replace(self._config, pipeline=pipeline)
        self._pp_size = pp_size
        self._dp_shard_size = dp_shard_size
        self._dp_replicate_size = dp_replicate_size

    def _requested_sizes(self) -> dict[str, int]:
        pp, shard = self._pp_size, self._dp_shard_size
        if pp is None:
            pp = self.num_processes if shard is None else REMAINING
        return {
            "pp": pp,
            "dp_replicate": 1 if self._dp_replicate_size is None else self._dp_replicate_size,
            "dp_shard": REMAINING if shard is None else shard,
        }
