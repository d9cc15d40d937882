"""Define the options of sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.model.units import MIN_NUM_PARAMS
from lightning_dist.techniques.options import Build, TechniqueOptions, argument
from lightning_dist.techniques.protocol import Parallel
from lightning_dist.techniques.sharding.fully_sharded import ShardingConfig

__all__ = ["ShardingOptions"]


@dataclass(frozen=True)
class ShardingOptions(TechniqueOptions):
    """Choose when sharded parameters are gathered and freed, and how ranks exchange them.

    Args:
        min_num_params: Number of parameters from which a module outside the blocks is sharded as one unit.
        reshard_after_forward: True: a block's gathered parameters are freed after its forward, and gathered again for
            its backward, which takes the least memory. False: they are kept, which saves a gather. A number: they are
            kept sharded over this many ranks.
        direct_collectives: Whether to all-gather and reduce-scatter in one round, in which each rank exchanges data
            with every other one. None: if the backend is gloo, whose own collectives take more rounds or more bytes.
        zero_stage: Which tensors each rank holds unsharded while a step runs, as in ZeRO (Rajbhandari et al., 2020);
            between steps, all tensors are sharded. 1: parameters, and gradients while an accumulation adds them
            up. 2: parameters; each backward of an accumulation reduces its gradients to shards. 3: only the parameters
            of the blocks that run; the same for gradients as 2. None: parameters as ``reshard_after_forward`` says, and
            gradients as with 1, which sends least in an accumulation.

    Raises:
        ValueError: If ``zero_stage`` is not None, 1, 2 or 3, or is given together with ``reshard_after_forward``.
    """

    min_num_params: int = MIN_NUM_PARAMS
    reshard_after_forward: bool | int = True
    direct_collectives: bool | None = None
    zero_stage: int | None = argument(None, only_with="zero_stage")

    def __post_init__(self) -> None:
        stage = self.zero_stage
        if stage not in (None, 1, 2, 3):
            raise ValueError(f"zero_stage={stage!r} must be 1, 2 or 3, or None.")
        if stage is not None and self.reshard_after_forward is not True:
            raise ValueError(
                f"zero_stage={stage} with reshard_after_forward={self.reshard_after_forward!r}: the stage says when"
                " parameters are freed. Leave one of the two out."
            )

    @property
    def reshards(self) -> bool | int:
        """Return whether parameters are freed after the forward, as one of the two arguments says."""
        return self.reshard_after_forward if self.zero_stage is None else self.zero_stage == 3

    @property
    def reduces_every_batch(self) -> bool:  # type: ignore[override]
        """Return whether each backward of an accumulation reduces its gradients."""
        return self.zero_stage in (2, 3)

    def has_effect(self, layout: ParallelLayout) -> bool:
        """Return whether parameters are sharded."""
        return layout.num_shards > 1

    def without_effect(self, layout: ParallelLayout) -> str:
        """Return a sentence about the arguments if nothing is sharded.

        This is not an error, so that a configuration for several devices can be tried on one.
        """
        if layout.num_shards > 1 or not self.given():
            return ""
        asked = ", ".join(f"{name}={value!r}" for name, value in self.given().items())
        return f"{asked} has no effect: dp_shard_size is 1, so that nothing is sharded."

    def config(self, build: Build) -> ShardingConfig:
        """Return the configuration from which the technique is built."""
        return ShardingConfig(
            param_dtype=build.precision.param_dtype,
            reduce_dtype=build.precision.reduce_dtype,
            reshard_after_forward=self.reshards,
            merges_units=self.zero_stage in (1, 2),
            direct_collectives=self.direct_collectives,
            gather_as=build.precision.gather_as,
        )

    def settings(self, parallel: Parallel) -> Mapping[str, Any]:
        """Return when parameters are freed."""
        return {"reshard_after_forward": self.reshards}
