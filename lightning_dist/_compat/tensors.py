"""Read and change DTensors beyond their public interface."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "GROUPED_MM",
    "accept_sequential_redistribution",
    "local_of",
    "num_packed",
    "on_equal",
    "on_scalar_read",
    "packed_shard",
    "replace_local",
    "shifted",
]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, without a node in autograd's graph.

    Replaced by: a public accessor of DTensor that does so.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def replace_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of ``tensor`` by ``local``.

    Replaced by: an assignment to ``tensor.data``, which DTensor ignores today.
    """
    tensor._local_tensor = local


def packed_shard(dim: int, num_packed: int) -> Placement:
    """Return the placement that splits a tensor along ``dim`` into ``num_packed`` equal parts, and shards each of them.

    It is for the weight of a layer that packs several layers, such as those of queries, keys and values. Replaced by: a
    public placement that does so.
    """
    return _StridedShard(dim, split_factor=num_packed)


def num_packed(placement: Placement) -> int:
    """Return the ``num_packed`` of a :func:`packed_shard`; 0 for other placements."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 0


def shifted(placement: Placement) -> Placement:
    """Return the placement of a tensor that has one more dimension, in front of the others."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def on_scalar_read(function: Callable[[DTensor], int | float | bool | complex]) -> None:
    """Let ``function`` compute the number that ``item()``, ``float()``, a comparison or a format reads from a DTensor.

    For a sum or norm that is still to be reduced, torch silently returns this rank's part, and cannot format it.

    Replaced by: an ``item()`` of DTensor that reduces.
    """

    def read(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> int | float | bool | complex:
        return function(args[0])

    def format_whole(self: DTensor, specification: str) -> str:
        if self.ndim == 0 and not self.is_meta:
            return format(self.item(), specification)
        return object.__format__(self, specification)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = read
    DTensor.__format__ = format_whole  # type: ignore[method-assign, assignment]


def on_equal(function: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Let ``function`` compute ``torch.equal`` of two tensors of which at least one is a DTensor.

    torch shards the second tensor like the first, which fails if it has fewer dimensions.

    Replaced by: a ``torch.equal`` that returns False for DTensors of different shapes.
    """

    def equal(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
        return function(args[0], args[1])

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = equal


def accept_sequential_redistribution() -> None:
    """Silence torch's warning, on each rank, that a norm over two mesh axes takes two all-reduces.

    Replaced by: a public way to flatten mesh axes, which the warning asks for.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


GROUPED_MM = torch.ops.aten._grouped_mm.default
"""The operation behind ``torch.nn.functional.grouped_mm``. On fake tensors it accepts only bfloat16 (torch 2.13)."""
