"""Provide ``strategy="nd_parallel"``."""

from __future__ import annotations

from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["NDParallelStrategy"]


class NDParallelStrategy(MeshStrategy):
    """Combine pipeline stages, replicas, sharding, and the splitting of sequences and layers, in one mesh.

    Args:
        pp_size: Number of processes that the stages are distributed over. None: 1.
        dp_replicate_size: Number of replicas. None: 1.
        dp_shard_size: Number of processes that a stage and the batch are sharded over. None: the number of processes
            divided by the other sizes.
        tp_size: Number of processes that a layer is split over. None: 1.
        cp_size: Number of processes that a sequence is split over (context parallelism). None: 1.
        ep_size: Number of processes that the experts of mixtures are distributed over, a divisor of the product of
            ``dp_shard_size`` and ``cp_size`` (expert parallelism). None: 1.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
    """

    strategy_name = "nd_parallel"
    offers = frozenset({"pp", "dp_replicate", "dp_shard", "tp", "cp", "ep"})

    def __init__(
        self,
        pp_size: int | None = None,
        dp_replicate_size: int | None = None,
        dp_shard_size: int | None = None,
        tp_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._pp_size = pp_size
        self._dp_replicate_size = dp_replicate_size
        self._dp_shard_size = dp_shard_size
        self._tp_size = tp_size
        self._cp_size = cp_size
        self._ep_size = ep_size

    def _requested_sizes(self) -> dict[str, int]:
        asked = {
            "pp": self._pp_size,
            "dp_replicate": self._dp_replicate_size,
            "dp_shard": self._dp_shard_size,
            "cp": self._cp_size,
            "tp": self._tp_size,
            "ep": self._ep_size,
        }
        sizes = {axis: 1 if size is None else size for axis, size in asked.items()}
        if self._dp_shard_size is None and REMAINING not in sizes.values():
            sizes["dp_shard"] = REMAINING
        return sizes
