"""Give each start of a run a store that no earlier start has written to.

When torchrun restarts the ranks after a failure, it passes them the store of the previous start. This still has the
keys of that start, so that ranks would connect to addresses at which no process listens any more. torchrun provides no
common number of the start, because each node counts its own failures. The ranks therefore agree on a random name.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

__all__ = ["fresh_store"]

_KEY = "lightning_dist/start"


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return ``store`` with a key prefix that only this start uses. All ranks must call this.

    Rank 0 returns when all ranks have called this, and the others return when rank 0 has called it.

    Args:
        store: Store that all ranks use, in this start and in earlier ones.
        rank: Global rank of this process.
        world_size: Number of ranks.
        timeout: Time to wait for the other ranks.

    Raises:
        TimeoutError: If a rank does not call this in time; the text names the missing ranks.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        _welcome(store, mine, world_size, deadline)
        return dist.PrefixStore(f"{_KEY}/{mine}", store)
    store.set(f"{_KEY}/hello/{rank}", mine)
    # Only rank 0 of this start answers to the random name that this process has just set.
    welcome = f"{_KEY}/welcome/{mine}"
    while not store.check([welcome]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} has waited {timeout.total_seconds():.0f} s for rank 0 to start")
        time.sleep(0.01)
    start = store.get(welcome).decode()
    store.set(f"{_KEY}/here/{start}/{rank}", "")
    return dist.PrefixStore(f"{_KEY}/{start}", store)


def _welcome(store: dist.Store, start: str, world_size: int, deadline: float) -> None:
    """Send the name of this start to all ranks through the store, until all of them have confirmed it.

    The store may still hold requests of processes of earlier starts. These are answered as well, but only processes of
    this start confirm the answer.

    Args:
        store: Store that all ranks use.
        start: Random name of this start.
        world_size: Number of ranks.
        deadline: Time of ``time.monotonic()`` after which to give up.

    Raises:
        TimeoutError: If ranks do not confirm before the deadline; the text names them.
    """
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
