"""Provide ``strategy="full_shard"``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_dist.mesh.layout import REMAINING
from lightning_dist.plugins.strategies.mesh import MeshStrategy

__all__ = ["FullShardStrategy"]


class FullShardStrategy(MeshStrategy):
    """Shard parameters, gradients and optimizer states over all processes by FSDP2.

    Args:
        dp_shard_size: Number of processes to shard over, which must be the number of all processes. None or -1: all
            processes.
        zero_stage: Which tensors each rank holds unsharded while a step runs, as in ZeRO (Rajbhandari et al., 2020);
            between steps, all tensors are sharded. 1: parameters, and gradients while an accumulation adds them
            up. 2: parameters; each backward of an accumulation reduces its gradients to shards. 3: only the parameters
            of the blocks that run; the same for gradients as 2. None: parameters as ``reshard_after_forward`` says, and
            gradients as with 1, which sends least in an accumulation.
        ep_size: Number of processes that the experts of mixtures are distributed over, a divisor of ``dp_shard_size``
            (expert parallelism). None: 1.
        expert_capacity: Largest number of tokens that a process sends to one expert in a forward of a training step.
            The others are left out for this expert, so that all sizes are known beforehand, and no host waits for
            numbers of tokens. None: all tokens are sent.
        kwargs: Arguments of :class:`~lightning_dist.plugins.strategies.mesh.MeshStrategy`.

    Raises:
        ValueError: If ``zero_stage`` is not None, 1, 2 or 3, or is given together with ``reshard_after_forward``.
    """

    strategy_name = "full_shard"

    def __init__(
        self,
        dp_shard_size: int | None = None,
        zero_stage: int | None = None,
        ep_size: int | None = None,
        expert_capacity: int | None = None,
        **kwargs: Any,
    ) -> None:
        if zero_stage not in (None, 1, 2, 3):
            raise ValueError(f"zero_stage={zero_stage!r} must be 1, 2 or 3, or None.")
        if zero_stage is not None:
            if kwargs.get("reshard_after_forward", True) is not True:
                raise ValueError(
                    f"zero_stage={zero_stage} with reshard_after_forward={kwargs['reshard_after_forward']!r}: the stage"
                    " says when parameters are freed. Leave one of the two out."
                )
            kwargs["reshard_after_forward"] = zero_stage == 3
        super().__init__(**kwargs)
        self._config = replace(self._config, expert_capacity=expert_capacity)
        if zero_stage in (1, 2):
            self._config = replace(self._config, sharding=replace(self._config.sharding, merges_units=True))
        self._dp_shard_size = dp_shard_size
        self._zero_stage = zero_stage
        self._reduces_every_batch = zero_stage in (2, 3)
        self._ep_size = ep_size

    def _requested_sizes(self) -> dict[str, int]:
        return {
            "dp_shard": REMAINING if self._dp_shard_size is None else self._dp_shard_size,
            "ep": 1 if self._ep_size is None else self._ep_size,
        }
