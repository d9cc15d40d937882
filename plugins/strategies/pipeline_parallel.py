"""Provide ``strategy="pipeline_parallel"``."""

from __future__ import annotations

from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["PipelineParallelStrategy"]


class PipelineParallelStrategy(MeshStrategy):
    """Cut a model into stages on different devices, and pass the microbatches of a batch through them.

    The user's module and its steps are not changed. The ranks of one pipeline have the same part of the batch.

    Args:
        pp_size: Number of processes that the stages are distributed over. None: the number of devices of a node, or,
            if ``dp_shard_size`` is given, the number of processes divided by the other sizes.
        dp_shard_size: Number of processes that a stage and the batch are sharded over. None: the number of processes
            divided by the other sizes.
        dp_replicate_size: Number of replicas. None: 1.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.

    """

    strategy_name = "pipeline_parallel"
    offers = frozenset({"dp_replicate", "dp_shard", "pp"})

    def __init__(
        self,
        pp_size: int | None = None,
        *,
        dp_shard_size: int | None = None,
        dp_replicate_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
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
