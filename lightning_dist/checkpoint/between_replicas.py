"""Turn the state of a run into one that a process with another device mesh can receive, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_dist._compat import local_of, tree_map

__all__ = ["from_replica", "to_replica"]


@dataclass(frozen=True)
class _Shard:
    """Hold a rank's shard of a tensor, and what makes a DTensor of it.

    Args:
        local: This rank's shard of the tensor.
        axes: Names of the dimensions of the mesh.
        placements: How the tensor is placed on each of them.
        shape: Shape of the whole tensor.
        stride: Stride of the whole tensor.
    """

    local: Tensor
    axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def to_replica(state: Any) -> Any:
    """Return ``state`` with each DTensor replaced by this rank's shard of it, without copies of tensors.

    Args:
        state: Nested dictionaries, lists and tuples.
    """
    return tree_map(_shard_of, state)


def from_replica(state: Any, mesh: DeviceMesh) -> Any:
    """Return what :func:`to_replica` was given on the rank of another replica with the same place in its mesh.

    Args:
        state: The result of :func:`to_replica` on that rank.
        mesh: The mesh of this replica, which has the same shape.
    """
    return tree_map(lambda value: _whole_of(value, mesh), state)


def _shard_of(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value.detach() if isinstance(value, Tensor) else value
    axes = value.device_mesh.mesh_dim_names or ()
    return _Shard(local_of(value.detach()), axes, tuple(value.placements), value.shape, value.stride())


def _whole_of(value: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(value, _Shard):
        return value
    part = mesh if value.axes == mesh.mesh_dim_names else mesh[value.axes]
    local = value.local.to(mesh.device_type)
    return DTensor.from_local(local, part, value.placements, run_check=False, shape=value.shape, stride=value.stride)
