"""Count the bytes that a rank sends to the ranks that work on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor

__all__ = ["Traffic", "count_all_reduce", "count_all_to_all", "count_gather", "count_reduce_scatter", "count_sent"]


class Traffic:
    """Add up the bytes that this rank sends in the collectives of a process group while it lives.

    The collectives are functions of autograd, which know their group alone. They find this object by the group's name.

    Args:
        group: Process group of the ranks.
        is_counted: Function that returns whether what is sent now counts.
    """

    def __init__(self, group: dist.ProcessGroup, is_counted: Callable[[], bool]) -> None:
        self._is_counted = is_counted
        self._num_bytes = 0.0
        _OF_GROUPS[group.group_name] = self

    def add(self, num_bytes: float) -> None:
        """Count ``num_bytes``, if what is sent now counts."""
        if self._is_counted():
            self._num_bytes += num_bytes

    def take(self) -> float:
        """Return the bytes that were counted since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0.0
        return num_bytes


_OF_GROUPS: WeakValueDictionary[str, Traffic] = WeakValueDictionary()


def count_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Count an all-reduce of ``tensor``, by the share of a ring: twice ``(n - 1) / n`` for ``n`` ranks."""
    _count(2 * tensor.nbytes / group.size(), group)


def count_gather(part: Tensor, group: dist.ProcessGroup) -> None:
    """Count an all-gather, in which this rank sends its ``part`` to each other rank."""
    _count(part.nbytes, group)


def count_reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Count a reduce-scatter, in which this rank sends each other rank its part of ``tensor``."""
    _count(tensor.nbytes / group.size(), group)


def count_all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Count an all-to-all, in which this rank sends each other rank an equal part of ``tensor``."""
    _count(tensor.nbytes / group.size(), group)


def count_sent(num_bytes: float, group: dist.ProcessGroup) -> None:
    """Count ``num_bytes`` that this rank sends to the other ranks together."""
    _count(num_bytes / max(group.size() - 1, 1), group)


def _count(num_bytes_to_each: float, group: dist.ProcessGroup) -> None:
    traffic = _OF_GROUPS.get(group.group_name)
    if traffic is not None:
        traffic.add(num_bytes_to_each * (group.size() - 1))
