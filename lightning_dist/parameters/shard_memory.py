"""Define the interface of a memory that keeps shards of parameters outside of the device between their uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

__all__ = ["ShardMemory"]


class ShardMemory(Protocol):
    """Keep shards of parameters in the memory of the CPU, or on a disk."""

    is_pinned: bool
    """Whether shards are in pinned memory of the CPU, from which accelerators copy without waiting."""

    def place(self, tensor: Tensor) -> Tensor:
        """Return a tensor in this memory with the values of ``tensor``, which is in the memory of the CPU."""

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Allow pages of ``tensors``, which are not used for now, to leave the memory; the values are kept."""
