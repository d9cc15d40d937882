"""Describe the ranks that are examined together, and on which nodes they are."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["Ranks"]

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Describe all ranks of an examination, from the view of one of them.

    Args:
        rank: Global rank of this process.
        device: Device of this process.
        nodes: For each rank, the index of its node.
        hosts: For each rank, the name of its host.
    """

    rank: int
    device: torch.device
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]

    @classmethod
    def connected(cls, device: torch.device) -> Ranks:
        """Describe the ranks of the default process group. This is a collective over all of them.

        torchrun gives the ranks of a node the same ``GROUP_RANK``. Without one, the ranks of a host are on one node.
        Without a process group, there is one rank.

        Args:
            device: Device of this process.
        """
        own = (os.environ.get("GROUP_RANK", platform.node()), platform.node())
        if not dist.is_initialized():
            return cls(0, device, (0,), (own[1],))
        of_ranks = _gathered(own)
        names = list(dict.fromkeys(node for node, _ in of_ranks))
        return cls(
            dist.get_rank(),
            device,
            tuple(names.index(node) for node, _ in of_ranks),
            tuple(host for _, host in of_ranks),
        )

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.nodes)

    @cached_property
    def of_nodes(self) -> list[list[int]]:
        """Return the ranks of each node, in increasing order."""
        return [[rank for rank, own in enumerate(self.nodes) if own == node] for node in range(max(self.nodes) + 1)]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks. This is a collective over all ranks.

        Args:
            value: This rank's value, which can be pickled.
        """
        return [value] if self.world_size == 1 else _gathered(value)

    def named(self, ranks: Iterable[int]) -> str:
        """Return a text that names ranks with their hosts: ``"rank 0, 1 (node1)"``; of many, only the first ones."""
        chosen = sorted(ranks)
        hosts = list(dict.fromkeys(self.hosts[rank] for rank in chosen))
        return f"rank {_shortened(list(map(str, chosen)))} ({_shortened(hosts)})"


_MAX_NAMED = 8


def _shortened(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _gathered(value: T) -> list[T]:
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]
