"""Provide ``strategy="context_parallel"``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.techniques.context_parallel import ContextParallelConfig

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
        attention: How attention sees the tokens of other ranks. ``"ulysses"``: ranks exchange heads for tokens;
            ``cp_size`` must divide the number of heads. ``"all_gather"``: each rank gathers all keys and values.
            ``"auto"``: ``"ulysses"`` if ``cp_size`` divides the number of heads.
        split_evaluations: Whether blocks run on parts of the sequence in validation, test and predict steps as well.
        ep_size: Number of processes that the experts of mixtures are distributed over, a divisor of the product of
            ``dp_shard_size`` and ``cp_size`` (expert parallelism). None: 1.
        expert_capacity: Largest number of tokens that a process sends to one expert in a forward of a training step.
            The others are left out for this expert, so that all sizes are known beforehand, and no host waits for
            numbers of tokens. None: all tokens are sent.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.
    """

    strategy_name = "context_parallel"

    def __init__(
        self,
        cp_size: int | None = None,
        dp_shard_size: int | None = None,
        dp_replicate_size: int | None = None,
        attention: str = "auto",
        split_evaluations: bool = False,
        ep_size: int | None = None,
        expert_capacity: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._cp_size = cp_size
        self._dp_shard_size = dp_shard_size
        self._dp_replicate_size = dp_replicate_size
        self._ep_size = ep_size
        split = ContextParallelConfig(attention, split_evaluations)
        self._config = replace(self._config, context_parallel=split, expert_capacity=expert_capacity)

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
