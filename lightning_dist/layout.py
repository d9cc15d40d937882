"""How ranks are laid out: the sizes of the mesh's axes. The only module that knows.

Axes, outermost first (ranks that differ only in the innermost axis are neighbours, on one node where that fits):

==============  =====================================================================================
``pp``            pipeline parallel: stages of the model follow each other over it, and hand on activations
``dp_replicate``  data parallel, weights replicated: gradients are all-reduced over it (between nodes)
``dp_shard``      data parallel, weights sharded: all-gather and reduce-scatter over it (inside a node)
``tp``            tensor parallel: single layers are split over it, and exchange activations (neighbours)
==============  =====================================================================================

Every rank of ``dp_replicate x dp_shard`` has a part of the batch of its own; those that differ only in ``pp`` or ``tp``
have the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["REMAINING", "STAGE_TO_STAGE", "ParallelLayout"]

STAGE_TO_STAGE = "stage to stage"
"""The description of process groups that have sends and receives only, of which ranks have different numbers."""

REMAINING = -1
"""As an axis's size: whatever is left of the world. At most one axis may have it."""


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes of the mesh's axes, validated; their product is the number of processes.

    Args:
        pp: Number of ranks that the model's stages are on.
        dp_replicate: Number of replicas of a stage.
        dp_shard: Number of ranks that one replica is sharded over.
        tp: Number of ranks that a layer is split over.

    Raises:
        ValueError: If a size is not a positive integer.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis}_size={size!r} is not a positive number of processes.")

    @classmethod
    def resolve(cls, world_size: int, **requested: int) -> ParallelLayout:
        """The layout for ``world_size`` processes in which at most one axis takes what is left.

        Args:
            world_size: Number of processes.
            requested: Axis name (``pp``, ``dp_replicate``, ``dp_shard``, ``tp``) to its size; ``-1`` is what is left.
                An axis that is not named has size 1.

        Raises:
            ValueError: If an axis does not exist, a size is zero or below -1, two are -1, or the sizes do not
                multiply to ``world_size``. The text names the argument, its value and sizes that would do.
        """
        axes = [field.name for field in fields(cls)]
        for axis, size in requested.items():
            if axis not in axes:
                raise ValueError(f"{axis}_size={size!r}: there is no axis {axis!r}; the axes are {', '.join(axes)}.")
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != REMAINING):
                raise ValueError(
                    f"{axis}_size={size!r} must be a positive number of processes, or -1 for what is left of the"
                    f" {world_size}."
                )
        remaining = [axis for axis, size in requested.items() if size == REMAINING]
        if len(remaining) > 1:
            names = " and ".join(f"{axis}_size" for axis in remaining)
            raise ValueError(f"{names} are both -1, but only one axis can take what is left; give the other a size.")
        sizes = dict(requested)
        product = math.prod(size for size in sizes.values() if size != REMAINING)
        if remaining:
            sizes[remaining[0]] = max(world_size // product, 1)
        if math.prod(sizes.values()) != world_size:
            asked = " x ".join(f"{axis}_size={size}" for axis, size in requested.items())
            processes = f"{world_size} process{'es' if world_size > 1 else ''}"
            rest = world_size
            for axis in ("tp", "pp"):
                size = sizes.get(axis, 1)
                if rest % size:
                    divisors = ", ".join(str(size) for size in range(1, rest + 1) if rest % size == 0)
                    raise ValueError(f"{asked} does not fit {processes}: {axis}_size must be one of {divisors}.")
                rest //= size
            raise ValueError(
                f"{asked} does not fit {processes}: the sizes must multiply to {world_size}. Set one of them to -1, or"
                f" use dp_replicate_size x dp_shard_size ="
                f" {', '.join(f'{r}x{rest // r}' for r in range(1, rest + 1) if rest % r == 0)}."
            )
        return cls(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return math.prod(self.sizes.values())

    @property
    def num_data_parallel(self) -> int:
        """Number of ranks that have a part of the batch of their own."""
        return self.dp_replicate * self.dp_shard

    def data_parallel_rank(self, global_rank: int) -> int:
        """Which part of the batch ``global_rank`` has, in ``[0, num_data_parallel)``."""
        return global_rank % (self.world_size // self.pp) // self.tp

    def pipeline_rank(self, global_rank: int) -> int:
        """The place of ``global_rank`` along ``pp``, in ``[0, pp)``."""
        return global_rank // (self.world_size // self.pp)

    @property
    def shares_batches(self) -> bool:
        """Whether several ranks have the same part of the batch."""
        return self.pp * self.tp > 1

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """The device mesh over all processes, one dimension an axis. Needs an initialised process group.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...
        """
        sizes = {axis: size for axis, size in self.sizes.items() if size > 1 or axis.startswith("dp_")}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def build_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that, with this one, have the parts of a batch; None: all processes. A collective over these."""
        if not self.shares_batches:
            return None
        stage = self.world_size // self.pp
        ranks = [range(first + rank, first + stage, self.tp) for first in range(0, self.world_size, stage)
                 for rank in range(self.tp)]  # fmt: skip
        return _own_group(ranks, "data parallel")

    def build_same_batch_group(self) -> dist.ProcessGroup | None:
        """The ranks that, with this one, have the same part of a batch; None: it alone. A collective over all."""
        if not self.shares_batches:
            return None
        ranks = [[rank for rank in range(self.world_size) if self.data_parallel_rank(rank) == part]
                 for part in range(self.num_data_parallel)]  # fmt: skip
        return _own_group(ranks, "same batch")

    def build_stage_to_stage_group(self) -> dist.ProcessGroup | None:
        """Return a second group of this rank's ``pp``, for sends between stages; None without pipelines.

        A collective over all processes. Stages in the middle send and receive more often than the outer ones. In the
        group of the collectives, that would let the ranks' numbers of operations differ: ``TORCH_DISTRIBUTED_DEBUG``
        takes this for a mismatch.
        """
        if self.pp == 1:
            return None
        step = self.world_size // self.pp
        return _own_group([range(first, self.world_size, step) for first in range(step)], STAGE_TO_STAGE)

    def sharding_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """What FSDP2 works on: ``(dp_replicate, dp_shard)``, or ``(dp_shard,)`` where there is one replica."""
        return mesh["dp_replicate", "dp_shard"] if self.dp_replicate > 1 else mesh["dp_shard"]

    def parameter_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Over what parameters are DTensors: the sharding mesh and ``tp``."""
        if self.tp == 1:
            return self.sharding_mesh(mesh)
        return mesh["dp_replicate", "dp_shard", "tp"] if self.dp_replicate > 1 else mesh["dp_shard", "tp"]

    def describe(self) -> dict[str, int]:
        """What a log says of the layout: ``<axis>_size`` of every axis."""
        return {f"{axis}_size": size for axis, size in self.sizes.items()}

    def __str__(self) -> str:
        shown = {axis: size for axis, size in self.sizes.items() if size > 1 or axis.startswith("dp_")}
        return " x ".join(f"{axis} {size}" for axis, size in shown.items())


def _own_group(members: Sequence[Sequence[int]], description: str) -> dist.ProcessGroup:
    """Create a process group for each list of ranks, and return the one that this rank is in."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        [list(ranks) for ranks in members], group_desc=description
    )[0]
    return group
