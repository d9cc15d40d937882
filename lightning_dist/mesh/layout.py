"""Lay out ranks on a device mesh.

No other module knows the axes, their sizes and their roles. Every axis is a row of :data:`AXES`, outermost first. Ranks
that differ only in their index along the innermost axis have consecutive numbers, and so are on one node if they fit
there. Ranks that differ only along axes with ``splits_batch`` have different parts of a batch; ranks that differ only
along other axes have the same part.

The axis ``ep`` of expert parallelism is not in the table, because it does not multiply the number of processes. The
ranks over which other parameters are sharded (``dp_shard`` and ``cp``) are divided into groups of ``ep`` consecutive
ones, each of which has all experts; every expert is sharded over the ranks with the same index in their groups.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dist._compat import created_with

__all__ = ["AXES", "REMAINING", "STAGE_TO_STAGE", "Axis", "ParallelLayout"]

STAGE_TO_STAGE = "stage to stage"
"""The description of process groups that only send and receive; the number of these operations differs by rank."""

REMAINING = -1
"""The size that lets an axis take all remaining processes; at most one axis may have it."""


@dataclass(frozen=True)
class Axis:
    """Describe an axis of the device mesh.

    Args:
        name: The name of the axis; the argument of a strategy for its size is ``<name>_size``.
        splits_batch: Whether ranks along the axis have different parts of the batch. Gradients are reduced over such an
            axis, and the mesh contains it even if its size is 1.
        shards_parameters: Whether ranks along the axis have different parts of a parameter.
        joins: Name of an outer axis. This axis and that one form a single mesh dimension together, within which ranks
            along this axis are consecutive. None: the axis has a mesh dimension of its own.
    """

    name: str
    splits_batch: bool
    shards_parameters: bool
    joins: str | None = None


AXES = (
    # Pipeline parallel: each rank along it has other stages of the model, and sends activations to its neighbours.
    Axis("pp", splits_batch=False, shards_parameters=False),
    # Data parallel with replicated weights: gradients are all-reduced over it, between nodes.
    Axis("dp_replicate", splits_batch=True, shards_parameters=False),
    # Data parallel with sharded weights: all-gathers and reduce-scatters run over it, inside a node.
    Axis("dp_shard", splits_batch=True, shards_parameters=True),
    # Context parallel: its ranks have parts of the sequences of one batch. They share the parameters like the ranks of
    # dp_shard, so that the gradients of all parts are averaged by the same reduction.
    Axis("cp", splits_batch=False, shards_parameters=True, joins="dp_shard"),
    # Tensor parallel: single layers are split over it, and their ranks exchange activations.
    Axis("tp", splits_batch=False, shards_parameters=True),
)
"""The axes of the device mesh, outermost first."""


@dataclass(frozen=True)
class ParallelLayout:
    """Hold the validated sizes of the mesh's axes; their product is the number of processes.

    Args:
        pp: Number of ranks over which the model's stages are distributed.
        dp_replicate: Number of replicas of a stage.
        dp_shard: Number of ranks that have different parts of the batch and shards of one replica.
        cp: Number of ranks over which a sequence is split; the parameters are sharded over them as well.
        tp: Number of ranks over which a layer is split.
        ep: Number of ranks over which experts are distributed, which divides ``dp_shard * cp``.

    Raises:
        ValueError: If a size is not a positive integer, or ``ep`` does not divide ``dp_shard * cp``.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis, size in {**self.sizes, "ep": self.ep}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis}_size={size!r} is not a positive number of processes.")
        if self.num_shards % self.ep:
            over = f"dp_shard_size={self.dp_shard}" + (f" x cp_size={self.cp}" if self.cp > 1 else "")
            raise ValueError(
                f"ep_size={self.ep} does not divide {over}, the ranks that parameters are sharded over: experts are"
                f" distributed over a part of these ranks. ep_size must be one of {_divisors(self.num_shards)}."
            )

    @classmethod
    def resolve(cls, world_size: int, **requested: int) -> ParallelLayout:
        """Return the layout for ``world_size`` processes, in which at most one axis takes all remaining ones.

        Args:
            world_size: Number of processes.
            requested: Sizes by axis name (``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``); ``-1`` stands for
                all remaining processes. An axis that is not named has size 1. The size of ``ep``, which is no factor of
                the number of processes, cannot be -1.

        Raises:
            ValueError: If an axis does not exist, a size is zero or below -1, two are -1, the sizes do not multiply
                to ``world_size``, or ``ep`` does not divide ``dp_shard * cp``. The text names the argument, its value
                and sizes that fit.
        """
        axes = [field.name for field in fields(cls)]
        ep = requested.pop("ep", 1)
        if isinstance(ep, bool) or not isinstance(ep, int) or ep < 1:
            raise ValueError(f"ep_size={ep!r} must be a positive number of processes.")
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
            raise ValueError(_misfit(world_size, requested))
        return cls(**sizes, ep=ep)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each axis but ``ep`` by its name, outermost first; their product is the world size."""
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    @property
    def _expert_sizes(self) -> dict[str, int]:
        """Return the sizes of the axes of the mesh of experts, outermost first."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.num_shards // self.ep,
            "ep": self.ep,
            "tp": self.tp,
        }

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return math.prod(self.sizes.values())

    @property
    def num_shards(self) -> int:
        """Return the number of ranks over which FSDP2 shards a parameter."""
        return self.dp_shard * self.cp

    @property
    def num_data_parallel(self) -> int:
        """Return the number of parts into which a batch is split."""
        return math.prod(self.sizes[axis.name] for axis in AXES if axis.splits_batch)

    def coordinates(self, global_rank: int) -> dict[str, int]:
        """Return the index of ``global_rank`` along each axis."""
        indices = torch.unravel_index(torch.tensor(global_rank), tuple(self.sizes.values()))
        return {axis: int(index) for axis, index in zip(self.sizes, indices, strict=True)}

    def data_parallel_rank(self, global_rank: int) -> int:
        """Return which part of the batch ``global_rank`` has, in ``[0, num_data_parallel)``."""
        coordinates, part = self.coordinates(global_rank), 0
        for axis in AXES:
            if axis.splits_batch:
                part = part * self.sizes[axis.name] + coordinates[axis.name]
        return part

    def ranks_over(self, axes: Collection[str]) -> list[list[int]]:
        """Return the groups of global ranks that differ only in their indices along ``axes``.

        If ``ep`` is one of them, ``dp_shard`` stands for the ranks that have shards of the same experts.
        """
        sizes = self._expert_sizes if "ep" in axes else self.sizes
        names = list(sizes)
        others = [dim for dim, name in enumerate(names) if name not in axes]
        inner = [dim for dim, name in enumerate(names) if name in axes]
        ranks = torch.arange(self.world_size).view(tuple(sizes.values())).permute(*others, *inner)
        size = math.prod(sizes[names[dim]] for dim in inner)
        groups: list[list[int]] = ranks.reshape(-1, size).tolist()
        return groups

    @property
    def shares_batches(self) -> bool:
        """Return whether several ranks have the same part of the batch."""
        return self.num_data_parallel < self.world_size

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Build the device mesh over all processes, with one dimension for each axis that does not join another one.

        The default process group must be initialised. Axes of size 1 are left out, except ``dp_shard``: for
        such an axis, torch makes a group for each rank of the world on every rank.

        Args:
            device_type: Device type of the mesh, such as ``"cpu"`` or ``"cuda"``.
        """
        sizes: dict[str, int] = {}
        for axis in AXES:
            size = self.sizes[axis.name]
            if axis.joins is not None:
                sizes[axis.joins] *= size
            elif axis.name == "dp_shard" or size > 1:
                sizes[axis.name] = size
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def build_expert_mesh(self, device_type: str) -> DeviceMesh:
        """Build a second device mesh over all processes, over which the parameters of experts are distributed.

        Its axes are ``pp``, ``dp_replicate``, ``dp_shard``, ``ep`` and ``tp``, where ``dp_shard`` has the ranks with
        the same experts. Axes of size 1 are left out, except ``dp_shard`` and ``ep``. This is a collective over all
        processes.

        Args:
            device_type: Device type of the mesh, such as ``"cpu"`` or ``"cuda"``.
        """
        sizes = {axis: size for axis, size in self._expert_sizes.items() if size > 1 or axis in ("dp_shard", "ep")}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def get_mesh(self, mesh: DeviceMesh, axis: str) -> DeviceMesh:
        """Return the one-dimensional mesh of ``axis``.

        Args:
            mesh: The mesh from :meth:`build_mesh`.
            axis: Name of an axis, such as ``tp``.

        Raises:
            ValueError: If the layout has a single rank along ``axis``, or there is no such axis.
        """
        if axis not in (mesh.mesh_dim_names or ()):
            raise ValueError(
                f"The layout {self} has no mesh of the axis {axis!r}: set {axis}_size to more than 1."
                if axis in self.sizes
                else f"There is no axis {axis!r}; the axes are {', '.join(self.sizes)}."
            )
        return mesh[axis]

    def build_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Create the group of ranks that together have all parts of the batch; return None if these are all processes.

        This is a collective over all processes.
        """
        return self._own_group([axis.name for axis in AXES if axis.splits_batch], "data parallel")

    def build_same_batch_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """Create the group of ranks with the same part of the batch, and return it; None if each rank has its own part.

        This is a collective over all processes.

        Args:
            backend: Backend of the group; None: that of the default group.
        """
        if not self.shares_batches:
            return None
        axes = [axis.name for axis in AXES if not axis.splits_batch]
        return self._own_group(axes, "same batch", may_be_all=True, backend=backend)

    def build_same_stage_group(self) -> dist.ProcessGroup | None:
        """Create the group of ranks that have the same parameters or shards of them; None stands for all processes.

        This is a collective over all processes.
        """
        return self._own_group(
            [axis.name for axis in AXES if axis.splits_batch or axis.shards_parameters], "same stage"
        )

    def build_context_group(self) -> dist.ProcessGroup | None:
        """Create the group of ranks along ``cp``, and return it; None if sequences are not split.

        This is a collective over all processes.
        """
        return self._own_group(["cp"], "context parallel", may_be_all=True) if self.cp > 1 else None

    def build_stage_to_stage_group(self) -> dist.ProcessGroup | None:
        """Create a second group of the ranks along ``pp``, for sends between stages; return None if there is one stage.

        This is a collective over all processes. Stages in the middle send and receive more often than the outer ones.
        In the group of the collectives, the ranks would therefore count different numbers of operations, which
        ``TORCH_DISTRIBUTED_DEBUG`` takes for a mismatch.
        """
        if self.pp == 1:
            return None
        return self._own_group(["pp"], STAGE_TO_STAGE, may_be_all=True)

    def _own_group(
        self, axes: Collection[str], description: str, may_be_all: bool = False, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Create a process group for each group of :meth:`ranks_over`, and return the one that this rank is in."""
        members = self.ranks_over(axes)
        if len(members) == 1 and not may_be_all:
            return None
        group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            members, backend=backend and created_with(backend), group_desc=description
        )[0]
        return group

    def sharding_mesh(self, mesh: DeviceMesh, within_replica: bool = False) -> DeviceMesh:
        """Return the mesh that FSDP2 works on: ``(dp_replicate, dp_shard)``, or ``(dp_shard,)`` with one replica.

        Args:
            mesh: The mesh from :meth:`build_mesh`.
            within_replica: Whether each replica trains on its own, so that the mesh has no axis of replicas.
        """
        has_replicas = self.dp_replicate > 1 and not within_replica
        return mesh["dp_replicate", "dp_shard"] if has_replicas else mesh["dp_shard"]

    def expert_meshes(self, mesh: DeviceMesh, within_replica: bool = False) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the mesh that FSDP2 works on for experts, and that of their parameters before they are sharded.

        The first has the axes ``(dp_replicate, dp_shard)`` or ``(dp_shard,)``, and the second ``(ep,)``, ``(ep, tp)``
        or ``(tp,)``. This is a collective over all processes if experts are distributed over ``ep``.

        Args:
            mesh: The mesh from :meth:`build_mesh`.
            within_replica: As for :meth:`sharding_mesh`.
        """
        if self.ep > 1:
            mesh = self.build_expert_mesh(mesh.device_type)
        axes = [axis for axis in ("ep", "tp") if axis in cast(tuple[str, ...], mesh.mesh_dim_names)]
        return self.sharding_mesh(mesh, within_replica), mesh[tuple(axes)]

    def build_expert_group(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """Return the group of ranks that have all experts together, without regard to shards.

        This is a collective over all processes if experts are distributed over both ``ep`` and ``tp``.

        Args:
            mesh: The second mesh from :meth:`expert_meshes`.
        """
        if mesh.ndim == 1:
            return mesh.get_group()
        return cast(dist.ProcessGroup, self._own_group(["ep", "tp"], "experts", may_be_all=True))

    def parameter_mesh(self, mesh: DeviceMesh, within_replica: bool = False) -> DeviceMesh:
        """Return the mesh over which parameters are DTensors: the sharding mesh and ``tp``.

        The arguments are those of :meth:`sharding_mesh`.
        """
        if self.tp == 1:
            return self.sharding_mesh(mesh, within_replica)
        has_replicas = self.dp_replicate > 1 and not within_replica
        return mesh["dp_replicate", "dp_shard", "tp"] if has_replicas else mesh["dp_shard", "tp"]

    def describe(self) -> dict[str, int]:
        """Return the entries of a log about the layout: ``<axis>_size`` of every axis."""
        return {f"{axis}_size": size for axis, size in {**self.sizes, "ep": self.ep}.items()}

    def __str__(self) -> str:
        shown = {axis.name: self.sizes[axis.name] for axis in AXES
                 if axis.splits_batch or self.sizes[axis.name] > 1}  # fmt: skip
        return " x ".join(f"{axis} {size}" for axis, size in shown.items())


_MODEL_AXES = ("tp", "cp", "pp")
"""The axes whose ranks share a batch, in the order in which their sizes are checked."""


def _misfit(world_size: int, requested: Mapping[str, int]) -> str:
    """Explain why sizes do not multiply to the number of processes, and name sizes of the requested axes that do."""
    given = {axis: size for axis, size in requested.items() if size != REMAINING}
    has_remaining = len(given) < len(requested)
    if has_remaining:  # A size of 1 is a default, or divides any number.
        given = {axis: size for axis, size in given.items() if size != 1}
    asked = " x ".join(f"{axis}_size={size}" for axis, size in given.items())
    text = f"{asked} does not fit {world_size} process{'es' if world_size > 1 else ''}: "
    rest = world_size
    for axis in _MODEL_AXES:
        size = given.get(axis, 1)
        if rest % size:
            return f"{text}{axis}_size must be one of {_divisors(rest)}."
        rest //= size
    if has_remaining:
        over_data = [f"{axis}_size" for axis in given if axis not in _MODEL_AXES]
        product = over_data[0] if len(over_data) == 1 else f"the product of {' and '.join(over_data)}"
        return f"{text}{product} must be one of {_divisors(rest)}."
    if "dp_shard" not in given:
        return f"{text}dp_replicate_size must be {rest}, or -1 for it."
    if "dp_replicate" not in given:
        return (
            f"{text}dp_shard_size must be {rest}, or -1 for it. To shard over fewer and have replicas, use"
            " strategy='hybrid_shard'."
        )
    pairs = ", ".join(f"{size}x{rest // size}" for size in range(1, rest + 1) if rest % size == 0)
    return (
        f"{text}the sizes must multiply to {world_size}. Set one of them to -1, or use dp_replicate_size x"
        f" dp_shard_size = {pairs}."
    )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
