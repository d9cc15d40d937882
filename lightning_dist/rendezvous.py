"""A store that no earlier start has written to: torchrun hands its own to the ranks it starts, again after a failure.

With the last start's keys in it, ranks look for each other where nobody listens any more. What torchrun tells the ranks
does not number the starts (each node counts its own failures), so that they find out among themselves which belong to
this one.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

__all__ = ["fresh_store"]

_KEY = "lightning_dist/start"


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of ``store`` that belongs to this start; all ranks are here when it returns.

    Args:
        store: What all ranks reach, now and at earlier starts.
        rank: This process among all.
        world_size: Number of ranks.
        timeout: How long to wait for the others.

    Raises:
        TimeoutError: If not all of them come; it names those.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        _welcome(store, mine, world_size, deadline)
        return dist.PrefixStore(f"{_KEY}/{mine}", store)
    store.set(f"{_KEY}/hello/{rank}", mine)
    # Only the first rank of this start answers what this process has just made up.
    welcome = f"{_KEY}/welcome/{mine}"
    while not store.check([welcome]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} has waited {timeout.total_seconds():.0f} s for rank 0 to start")
        time.sleep(0.01)
    start = store.get(welcome).decode()
    store.set(f"{_KEY}/here/{start}/{rank}", "")
    return dist.PrefixStore(f"{_KEY}/{start}", store)


def _welcome(store: dist.Store, start: str, world_size: int, deadline: float) -> None:
    """Answer everybody, those that are no more included, until all have come that heard it."""
    answered: dict[int, str] = {}
    missing = set(range(1, world_size))
    while missing:
        for rank in missing:
            hello = f"{_KEY}/hello/{rank}"
            name = store.get(hello).decode() if store.check([hello]) else ""
            if name and answered.get(rank) != name:
                answered[rank] = name
                store.set(f"{_KEY}/welcome/{name}", start)
        missing = {rank for rank in missing if not store.check([f"{_KEY}/here/{start}/{rank}"])}
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {', '.join(map(str, sorted(missing)))} did not start in time")
        time.sleep(0.01 if missing else 0.0)
