"""Describe the part of a tensor that this rank holds as index boxes, which checkpoints write, read and send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_dist._compat import num_packed

__all__ = ["ShardSlice", "ShardSlices", "local_part"]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, detached and without a copy."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True)
class ShardSlice:
    """Represent one box of a tensor: a range of indices per dimension whose elements this rank holds.

    Args:
        offsets: First index of the box in the whole tensor, for each dimension.
        sizes: Number of indices of the box, for each dimension.
        in_part: Slices that select the box in this rank's local part.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    in_part: tuple[slice, ...]


class ShardSlices(dict[Any, tuple[ShardSlice, ...]]):
    """Cache the boxes of tensors by layout: a model has many of the same layout, and torch computes them slowly."""

    def of(self, tensor: Tensor) -> tuple[ShardSlice, ...]:
        """Return the boxes of ``tensor`` that this rank holds. Boxes are empty only if this rank's part is empty."""
        if not isinstance(tensor, DTensor):
            return (ShardSlice((0,) * tensor.ndim, tuple(tensor.shape), (slice(None),) * tensor.ndim),)
        key = tensor.shape, tensor.device_mesh, tensor.placements
        if key not in self:
            self[key] = tuple(_slices(tensor))
        return self[key]


def _slices(tensor: DTensor) -> Iterator[ShardSlice]:
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch gives it no types
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    packed = [(axis, num_packed(placement)) for axis, placement in enumerate(tensor.placements)]
    packed = [(axis, number) for axis, number in packed if number and _is_packed(tensor, axis)]
    if not packed:
        yield ShardSlice(offsets, sizes, (slice(None),) * tensor.ndim)
        return
    # The tensor packs several layers. This rank has a part of each of them, but torch describes these parts as one box.
    ((axis, number),) = packed
    dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
    rows, length = tensor.shape[dim] // number, sizes[dim] // number
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for index in range(number):
        start = index * rows + coordinate[axis] * length
        in_part = slice(index * length, (index + 1) * length)
        yield ShardSlice(
            (*offsets[:dim], start, *offsets[dim + 1 :]),
            (*sizes[:dim], length, *sizes[dim + 1 :]),
            (*(slice(None),) * dim, in_part, *(slice(None),) * (tensor.ndim - dim - 1)),
        )


def _is_packed(tensor: DTensor, axis: int) -> bool:
    """Return whether the placement on a mesh axis is that of a packed layer, and not one of FSDP2.

    FSDP2 uses the same class of placement if a later axis, ``tp``, shards the same dimension.
    """
    dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
    return all(getattr(other, "dim", None) != dim for other in tensor.placements[axis + 1 :])
