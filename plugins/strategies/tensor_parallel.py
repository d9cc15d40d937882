"""Provide ``strategy="tensor_parallel"``."""

from __future__ import annotations

from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["TensorParallelStrategy"]


class TensorParallelStrategy(MeshStrategy):
    """Split single layers over the devices of a node, and shard each device's part over the rest (TP with FSDP2).

    The ranks of one ``tp`` group have the same part of the batch.

    Args:
        tp_size: Number of processes that a layer is split over. None: the number of devices of a node, or, if
            ``dp_shard_size`` is given, the number of processes divided by the other sizes.
        dp_shard_size: Number of processes that parameters and batch are sharded over. None: the number of processes
            divided by the other sizes.
        dp_replicate_size: Number of replicas. None: 1.
        ep_size: Number of processes over which experts are distributed (expert parallelism), a divisor of
            ``dp_shard_size``. Experts are distributed over ``tp`` as well, if ``ep_size * tp_size`` divides their
            number. None: 1.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
    """

    strategy_name = "tensor_parallel"
    offers = frozenset({"dp_replicate", "dp_shard", "tp", "ep"})

    def __init__(
        self,
        tp_size: int | None = None,
        dp_shard_size: int | None = None,
        dp_replicate_size: int | None = None,
        *,
        ep_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._tp_size = tp_size
        self._dp_shard_size = dp_shard_size
        self._dp_replicate_size = dp_replicate_size
        self._ep_size = ep_size

    def _requested_sizes(self) -> dict[str, int]:
        tp, shard = self._tp_size, self._dp_shard_size
        if tp is None:
            tp = self.num_processes if shard is None else REMAINING
        return {
            "dp_replicate": 1 if self._dp_replicate_size is None else self._dp_replicate_size,
            "dp_shard": REMAINING if shard is None else shard,
            "tp": tp,
            "ep": 1 if self._ep_size is None else self._ep_size,
        }
