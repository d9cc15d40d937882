"""An error on some ranks ends the run on all of them, and leaves processes that can talk to each other.

A rank that fails alone leaves the others waiting for it in a collective. They are waked by its connections, which it
closes; then every rank has an error, and all of them form a process group anew, for the checkpoint that a callback
saves after an error, and for what a user does who catches it.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_dist import _compat
from lightning_dist.consensus import OtherRankError

__all__ = ["end_together"]

SOON_S = 2.0
"""How long a rank that failed waits for others that fail by themselves, before it closes its connections."""

_errors: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""How often a run ended in an error, in the processes' default group."""


def end_together(error: BaseException, backend: str | None, timeout: timedelta | None, wait_s: float = 30.0) -> bool:
    """Wait until every rank has an error; where some have none, let them have one.

    To be called by every rank that has an error, before it does anything else. Where the connections broke and no rank
    says that it failed, a process has died, which is its launcher's business: then this returns at once.

    Args:
        error: What this rank has raised. Where another failed first, a note says so.
        backend: Of the process group that is formed anew.
        timeout: Of the same.
        wait_s: How long to wait for ranks that compute, and notice late.

    Returns:
        Whether the process group is another one now: groups and meshes from before are of no use then.

    Raises:
        OtherRankError: If a rank has no error in time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store, group = dist.distributed_c10d._get_default_store(), dist.distributed_c10d._get_default_group()
    counter = _errors.setdefault(group, Counter())
    start = f"lightning_dist/error/{counter['errors']}"
    keys = [f"{start}/{other}" for other in range(world_size)]
    is_consequence = _compat.is_connection_error(error)
    if is_consequence and not any(store.check([key]) for key in keys):
        return False
    counter["errors"] += 1
    store.set(keys[rank], "" if is_consequence else f"{type(error).__name__}: {error}")
    # The first rank to know decides for all: some may be late for the one's patience, and early for the other's.
    found = "intact" if not is_consequence and _wait(store, keys, SOON_S) else "broken"
    if store.compare_set(f"{start}/groups", "", found).decode() == "intact":
        return False
    _compat.leave_process_groups()
    if not _wait(store, keys, wait_s):
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise OtherRankError(
            f"Rank {', '.join(missing)} did not notice within {wait_s:.0f} s that this rank had failed."
        ) from error
    texts = {other: store.get(key).decode() for other, key in enumerate(keys)}
    if is_consequence:
        error.add_note(" ".join(f"Rank {other} failed: {text}" for other, text in texts.items() if text))
    anew = dist.PrefixStore(f"{start}/anew", store)
    dist.init_process_group(backend, store=anew, rank=rank, world_size=world_size, timeout=timeout)
    return True


def _wait(store: dist.Store, keys: list[str], timeout_s: float) -> bool:
    """Return whether all ``keys`` are there before ``timeout_s`` is over."""
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
