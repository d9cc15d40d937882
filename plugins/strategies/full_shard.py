"""Provide ``strategy="full_shard"``."""

from __future__ import annotations

from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["FullShardStrategy"]


class FullShardStrategy(MeshStrategy):
    """Shard parameters, gradients and optimizer states over all processes by FSDP2.

    Args:
        dp_shard_size: Number of processes to shard over, which must be the number of all processes. None or -1: all
            processes.
        ep_size: Number of processes that the experts of mixtures are distributed over, a divisor of ``dp_shard_size``
            (expert parallelism). None: 1.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
    """

    strategy_name = "full_shard"
    offers = frozenset({"dp_shard", "ep", "zero_stage"})

    def __init__(
        self,
        dp_shard_size: int | None = None,
        *,
        ep_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._dp_shard_size = dp_shard_size
        self._ep_size = ep_size

    def _requested_sizes(self) -> dict[str, int]:
        return {
            "dp_shard": REMAINING if self._dp_shard_size is None else self._dp_shard_size,
            "ep": 1 if self._ep_size is None else self._ep_size,
        }
