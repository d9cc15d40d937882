"""Decide which rank owns which parameter, and exchange parts of parameters between their owners and all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_dist._compat import backend_of, default_group, new_group_of
from lightning_dist.mesh.objects import gather_objects
from lightning_dist.parameters.shard_slices import ShardSlices

__all__ = ["Box", "Owners", "Parts", "exchange", "group_of_shards"]

_ALIGNMENT = 16
"""Positions of tensors in a message are multiples of this number of bytes."""


def group_of_shards(params: Sequence[Tensor]) -> dist.ProcessGroup | None:
    """Return the process group of the ranks that together have one copy of ``params``; None: each rank has all of them.

    This may be a collective over these ranks.

    Args:
        params: Parameters of this rank, which may be sharded along different axes of their meshes.
    """
    ranks: set[int] = set()
    of_axes: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for param in params:
        if not isinstance(param, DTensor):
            continue
        mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
        assert coordinate is not None
        axes = [axis for axis, placement in enumerate(param.placements) if not placement.is_replicate()]
        index = tuple(slice(None) if axis in axes else place for axis, place in enumerate(coordinate))
        ranks.update(mesh.mesh[index].flatten().tolist())
        for axis in axes:
            of_axes[tuple(dist.get_process_group_ranks(mesh.get_group(axis)))] = mesh.get_group(axis)
    if len(ranks) <= 1:
        return None
    members = sorted(ranks)
    if len(members) == dist.get_world_size():
        return default_group()
    group = of_axes.get(tuple(members))
    return group or new_group_of(members, backend_of(), "owners of parameters")


@dataclass(frozen=True)
class Box:
    """Describe a part of a tensor by the first index and the number of indices in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def in_whole(self) -> tuple[slice, ...]:
        """Return the slices that select the part in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Parts:
    """Say which parts of a parameter the ranks of a group have, and which rank owns it.

    Args:
        owner: Rank in the group that owns the parameter; None: all ranks have the whole parameter, and own it.
        boxes: The boxes that each rank has.
        sent: For each rank, indices of the boxes that it sends to the owner. Where several ranks have the same box, one
            of them sends it.
    """

    owner: int | None
    boxes: tuple[tuple[Box, ...], ...]
    sent: tuple[tuple[int, ...], ...]

    def is_owned_by(self, rank: int) -> bool:
        """Return whether ``rank`` owns the parameter."""
        return self.owner is None or self.owner == rank

    def num_elements_moved(self, rank: int) -> tuple[int, int]:
        """Return how many elements ``rank`` sends to the owner, and how many it sends as the owner."""
        if self.owner is None:
            return 0, 0
        to_owner = sum(self.boxes[rank][index].numel for index in self.sent[rank]) if rank != self.owner else 0
        others = (boxes for other, boxes in enumerate(self.boxes) if other != rank)
        return to_owner, sum(box.numel for boxes in others for box in boxes) if rank == self.owner else 0


class Owners:
    """Choose an owner for each parameter, so that all ranks own about as many bytes.

    Args:
        group: Process group of the ranks that together have the parameters.
        has_one: Whether the first rank owns all parameters.
    """

    def __init__(self, group: dist.ProcessGroup, has_one: bool) -> None:
        self._group = group
        self._has_one = has_one
        self._load = [0] * group.size()
        self._slices = ShardSlices()

    def of(self, params: Sequence[Tensor]) -> list[Parts]:
        """Return the parts of ``params``, which are the same parameters on all ranks. This is a collective."""
        own = [
            [Box(part.offsets, part.sizes) for part in self._slices.of(param) if math.prod(part.sizes)]
            for param in params
        ]
        of_ranks = gather_objects(own, self._group)
        result: list[Parts | None] = [None] * len(params)
        for index in sorted(range(len(params)), key=lambda index: -params[index].numel()):
            param, boxes = params[index], [tuple(of_rank[index]) for of_rank in of_ranks]
            is_whole = all(sum(box.numel for box in part) == param.numel() for part in boxes)
            owner: int | None = 0 if self._has_one else self._load.index(min(self._load))
            if is_whole and not self._has_one:
                owner = None
            else:
                assert owner is not None
                self._load[owner] += param.numel() * param.element_size()
            result[index] = Parts(owner, tuple(boxes), _senders(boxes, owner))
        return [parts for parts in result if parts is not None]

    def in_part(self, param: Tensor) -> list[tuple[slice, ...]]:
        """Return the slices that select this rank's boxes in its part of ``param``."""
        return [part.in_part for part in self._slices.of(param) if math.prod(part.sizes)]


def _senders(boxes: Sequence[tuple[Box, ...]], owner: int | None) -> tuple[tuple[int, ...], ...]:
    sent: list[list[int]] = [[] for _ in boxes]
    found: set[Box] = set()
    for rank in sorted(range(len(boxes)), key=lambda rank: rank != owner):  # The owner has its own boxes already.
        for index, box in enumerate(boxes[rank]):
            if box not in found:
                found.add(box)
                sent[rank].append(index)
    return tuple(map(tuple, sent))


def exchange(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Copy tensors of each rank into tensors of other ranks. This is a collective over ``group``.

    Args:
        sent: For each rank that they are sent to, the tensors of this rank, of any dtypes.
        received: For each rank that they come from, the tensors of this rank that are overwritten; shapes and dtypes
            are those of what is sent.
        device: Device of the tensors.
        group: Process group of the ranks.
    """
    rank = group.rank()
    for target, source in zip(received[rank], sent[rank], strict=True):
        target.copy_(source)
    outgoing = [[] if other == rank else of_rank for other, of_rank in enumerate(sent)]
    incoming = [[] if other == rank else of_rank for other, of_rank in enumerate(received)]
    sizes_out, sizes_in = [sum(map(_room, part)) for part in outgoing], [sum(map(_room, part)) for part in incoming]
    message = torch.empty(sum(sizes_out), dtype=torch.uint8, device=device)
    answer = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
    for tensor, place in _places(outgoing, message):
        place.copy_(tensor)
    dist.all_to_all_single(answer, message, sizes_in, sizes_out, group=group)
    for tensor, place in _places(incoming, answer):
        tensor.copy_(place)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _places(tensors: Sequence[Sequence[Tensor]], message: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor with the part of a message, of the same shape and dtype, that has its values."""
    result, start = [], 0
    for tensor in (tensor for of_rank in tensors for tensor in of_rank):
        num_bytes = tensor.numel() * tensor.element_size()
        result.append((tensor, message[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)))
        start += _room(tensor)
    return result
