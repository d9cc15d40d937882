"""Provide ``strategy="data_parallel"``."""

from __future__ import annotations

from typing import Any

from lightning_dist.mesh.layout import AXES, REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["DataParallelStrategy"]


class DataParallelStrategy(MeshStrategy):
    """Replicate the model on every process and average the gradients, as DDP does.

    No ``find_unused_parameters`` is needed for parameters that only some ranks use.

    Args:
        dp_replicate_size: Number of replicas, which must be the number of all processes. None or -1: one replica on
            each process.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.

    Raises:
        ValueError: If an argument is the size of an axis that this strategy does not have, or configures sharding.
    """

    strategy_name = "data_parallel"
    offers = frozenset({"dp_replicate"})

    def __init__(self, dp_replicate_size: int | None = None, **kwargs: Any) -> None:
        axes = {"ep_size", *(f"{axis.name}_size" for axis in AXES)} - {"dp_replicate_size"}
        for name in sorted(axes & kwargs.keys()):
            raise ValueError(
                f"{name}={kwargs[name]!r}: data_parallel only has replicas, whose number is dp_replicate_size. Use"
                " strategy='hybrid_shard' to shard the model, or 'nd_parallel' for any sizes."
            )
        super().__init__(**kwargs)
        arguments = self._config.arguments
        for name in filter(arguments.is_given, ("min_num_params", "reshard_after_forward", "direct_collectives")):
            raise ValueError(
                f"{name}={arguments[name]!r}: data_parallel shards nothing, so that it would have no effect. Leave it"
                " out, or use strategy='hybrid_shard' to shard the model."
            )
        self._dp_replicate_size = dp_replicate_size

    def _requested_sizes(self) -> dict[str, int]:
        return {"dp_replicate": REMAINING if self._dp_replicate_size is None else self._dp_replicate_size}
