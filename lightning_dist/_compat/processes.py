"""Reach torch's process groups, their store, and the record of their collectives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "default_group",
    "default_store",
    "num_collectives",
    "process_groups",
    "recorded_collectives",
    "without_process_group",
]


def default_group() -> dist.ProcessGroup:
    """Return the process group of all processes."""
    group = dist.group.WORLD
    assert group is not None, "there is no process group"
    return group


def default_store() -> dist.Store:
    """Return the store with which the default process group was created.

    Replaced by: a public accessor of it.
    """
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups that this rank is in; torch's public functions return only the default one."""
    return list(dist.distributed_c10d._world.pg_map)


@contextmanager
def without_process_group() -> Iterator[None]:
    """Let code in this context find no process group, as in a program of one process.

    Replaced by: a public way to run code outside of the process group that is initialized.
    """
    world = dist.distributed_c10d._world
    default, world.default_pg = world.default_pg, None
    try:
        yield
    finally:
        world.default_pg = default


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives of ``group`` this rank has entered.

    Raises:
        RuntimeError: If the backend does not count them.
    """
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # the stub leaves it out
    return number


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder, and of the additional one for NCCL that CUDA builds have.

    Replaced by: a documented dump as JSON; only the pickled one is documented.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(torch._C._distributed_c10d, name, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    return entries
