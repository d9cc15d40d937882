"""Which part of a tensor this rank has, as boxes: what is written, read and sent of it."""

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
    """What this rank has of ``tensor``, not a copy."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True)
class ShardSlice:
    """What is one piece of a tensor and of this rank's part of it.

    Args:
        offsets: Where in the tensor it begins.
        sizes: Its shape.
        in_part: Where in the part it is.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    in_part: tuple[slice, ...]


class ShardSlices(dict[Any, tuple[ShardSlice, ...]]):
    """What this rank has of a tensor. A model has many of the same shape, and torch takes its time."""

    def of(self, tensor: Tensor) -> tuple[ShardSlice, ...]:
        """The boxes of ``tensor``, none empty unless the part is."""
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
    packed = [(axis, number) for axis, number in packed if number and _is_packed(tensor, axis, number)]
    if not packed:
        yield ShardSlice(offsets, sizes, (slice(None),) * tensor.ndim)
        return
    # A part of each of several layers in one, which torch takes for one piece.
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


def _is_packed(tensor: DTensor, axis: int, number: int) -> bool:
    """Whether a placement is of a packed layer, and not of FSDP2, which uses the same where ``tp`` shards that dim."""
    dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
    return all(getattr(other, "dim", None) != dim for other in tensor.placements[axis + 1 :])
