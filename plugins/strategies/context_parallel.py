"""Provide ``strategy="context_parallel"``."""

from __future__ import annotations

from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["ContextParallelStrategy"]


class ContextParallelStrategy(MeshStrategy):
    """Split sequences over the devices of a node, and shard batch and parameters over all devices (CP with FSDP2).

    The ranks of one ``cp`` group have the same part of the batch. The model's blocks compute on parts of its sequences,
    and the rest of the step on whole sequences. Parameters are sharded over ``dp_shard`` and ``cp`` together.

    Args:
        cp_size: Number of processes that a sequence is split over. None: the number of devices of a node, or, if
            ``dp_shard_size`` is given, the number of processes divided by the other sizes.
        dp_shard_size: Number of parts into which the batch is split within a replica. None: the number of processes
            divided by the other sizes.
        dp_replicate_size: Number of replicas. None: 1.
        ep_size: Number of processes that the experts of mixtures are distributed over, a divisor of the product of
            ``dp_shard_size`` and ``cp_size`` (expert parallelism). None: 1.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
    """

    strategy_name = "context_parallel"
    offers = frozenset({"dp_replicate", "dp_shard", "cp", "ep"})

    def __init__(
        self,
        cp_size: int | None = None,
        dp_shard_size: int | None = None,
        dp_replicate_size: int | None = None,
        *,
        ep_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._cp_size = cp_size
        self._dp_shard_size = dp_shard_size
        self._dp_replicate_size = dp_replicate_size
        self._ep_size = ep_size

    def _requested_sizes(self) -> dict[str, int]:
        cp, shard = self._cp_size, self._dp_shard_size
        if cp is None:
            cp = self.num_processes if shard is None else REMAINING
        return {
            "dp_replicate": 1 if self._dp_replicate_size is None else self._dp_replicate_size,
            "dp_shard": REMAINING if shard is None and cp != REMAINING else 1 if shard is None else shard,
            "cp": cp,
            "ep": 1 if self._ep_size is None else self._ep_size,
        }
