"""Exchange Python objects between ranks."""

from __future__ import annotations

from typing import TypeVar, cast

import torch.distributed as dist

from lightning_dist._compat import simulated_backend

__all__ = ["broadcast_object", "gather_objects"]

_Value = TypeVar("_Value")


def gather_objects(value: _Value, group: dist.ProcessGroup | None = None) -> list[_Value]:
    """Return the values of all ranks, in the order of the ranks. This is a collective over ``group``.

    In a simulation of many ranks, all of them have this rank's value.

    Args:
        value: This rank's value, which can be pickled.
        group: Process group of the ranks; None: all processes.
    """
    num_ranks = dist.get_world_size(group)
    if simulated_backend() is not None:
        return [value] * num_ranks
    values: list[_Value | None] = [None] * num_ranks
    dist.all_gather_object(values, value, group)
    return cast(list[_Value], values)


def broadcast_object(value: _Value, group: dist.ProcessGroup | None = None, source: int = 0) -> _Value:
    """Return the value of one rank on all ranks. This is a collective over ``group``.

    In a simulation of many ranks, this rank's value stands for that of the source.

    Args:
        value: This rank's value, which can be pickled; only that of the source is sent.
        group: Process group of the ranks; None: all processes.
        source: Rank in ``group`` whose value is returned.
    """
    values = [value]
    if simulated_backend() is None:
        dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]
