"""Provide ``strategy="hybrid_shard"``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.mesh.replica_range import ReplicaRange
from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["HybridShardStrategy"]


class HybridShardStrategy(MeshStrategy):
    """Shard the model inside a node and replicate it between nodes (HSDP on FSDP2).

    All-gathers and reduce-scatters stay inside a replica; between replicas only each rank's shard of the gradients is
    all-reduced, once per optimizer step.

    Args:
        dp_replicate_size: Number of replicas. None: the number of nodes, or the number of processes divided by
            ``dp_shard_size`` if that is given.
        dp_shard_size: Number of processes over which one replica is sharded. None: the number of devices of a node, or
            the number of processes divided by ``dp_replicate_size`` if that is given. At most one of the two sizes may
            be -1, which stands for the number of processes divided by the other size.
        ep_size: Number of processes that the experts of mixtures are distributed over, a divisor of ``dp_shard_size``
            (expert parallelism). None: 1.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
    """

    strategy_name = "hybrid_shard"
    offers = frozenset({"dp_replicate", "dp_shard", "ep"})

    def __init__(
        self,
        dp_replicate_size: int | None = None,
        dp_shard_size: int | None = None,
        ep_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._dp_replicate_size = dp_replicate_size
        self._dp_shard_size = dp_shard_size
        self._ep_size = ep_size

    def _requested_sizes(self) -> dict[str, int]:
        replicate, shard = self._dp_replicate_size, self._dp_shard_size
        ep = 1 if self._ep_size is None else self._ep_size
        if replicate is None and shard is None:
            is_elastic = ReplicaRange.asked(self.config.arguments["elastic"]) is not None  # The others are other jobs.
            if self.num_nodes == 1 and self.num_processes > 1 and not is_elastic:
                rank_zero_warn(
                    "strategy='hybrid_shard' on one node, with no sizes given, is one replica sharded over its"
                    f" {self.num_processes} devices: the same as 'full_shard'. Set dp_replicate_size to have replicas."
                )
            return {"dp_replicate": self.num_nodes, "dp_shard": self.num_processes, "ep": ep}
        return {
            "dp_replicate": REMAINING if replicate is None else replicate,
            "dp_shard": REMAINING if shard is None else shard,
            "ep": ep,
        }
