"""Raise an error on all ranks if it occurs on one of them, so that the others do not hang."""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_dist._compat import default_group, default_store, simulated_backend
from lightning_dist.mesh.objects import gather_objects

__all__ = [
    "OtherRankError",
    "announce_progress",
    "check_agreement",
    "is_consequence",
    "raise_on_all_ranks",
    "timed_barrier",
    "timed_barrier_unless_missed",
]


class OtherRankError(RuntimeError):
    """Report that another rank failed in an operation of all ranks; the text names the rank and its error."""


def _has_others() -> bool:
    """Return whether there are other processes, which can be waited for."""
    return dist.is_initialized() and dist.get_world_size() > 1 and simulated_backend() is None


_LOST_CONNECTION = re.compile(r"Connection (closed|reset) by peer|Connection refused|Broken pipe", re.IGNORECASE)


def is_consequence(error: BaseException) -> bool:
    """Return whether ``error`` only says that another process has failed or ended."""
    lost = isinstance(error, (OtherRankError, dist.DistNetworkError, dist.DistBackendError))
    return lost or (isinstance(error, (RuntimeError, OSError)) and bool(_LOST_CONNECTION.search(str(error))))


@contextmanager
def raise_on_all_ranks(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the body of the context on all ranks, and raise an error on all of them if any rank raises one.

    This is a collective over ``group``. The body must not contain collectives in which the other ranks would wait for a
    rank that failed.

    Args:
        what: Description of the body for the message, such as ``"reading the checkpoint"``.
        group: Process group of the ranks; None: all processes.

    Raises:
        OtherRankError: On the ranks that succeeded, if another rank failed. Failing ranks raise their own error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        texts = gather_objects(f"{type(error).__name__}: {error}" if error else None, group)
        failed = [(rank, text) for rank, text in enumerate(texts) if text]
        if failed and error is None:
            rank, text = failed[0]
            raise OtherRankError(f"{what} failed on {len(failed)} of {len(texts)} ranks; rank {rank}: {text}")
    if error is not None:
        raise error


_arrivals: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""Number of this process's arrivals at each barrier, for each default process group that was created."""


def timed_barrier(what: str, timeout_s: float = 60.0, ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank has called this, and raise an error that names the missing ranks after a timeout.

    Args:
        what: Description, for the message, of what the ranks are about to do together.
        timeout_s: Seconds to wait for the others.
        ranks: Global ranks that call this, including this one; None: all.

    Raises:
        OtherRankError: If a rank did not arrive in time.
    """
    if not _has_others():
        return
    expected = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    arrivals = _arrivals.setdefault(default_group(), Counter())
    arrivals[what] += 1
    store = default_store()
    keys = [f"lightning_dist/barrier/{what}/{arrivals[what]}/{rank}" for rank in expected]
    store.set(keys[expected.index(dist.get_rank())], "")
    deadline = time.monotonic() + timeout_s
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except (RuntimeError, dist.DistStoreError) as error:
        missing = [rank for rank, key in zip(expected, keys, strict=True) if not store.check([key])]
        raise OtherRankError(
            f"{what}: rank {', '.join(map(str, missing))} did not arrive within {timeout_s:.0f} s. Every rank must do"
            " this; is it under `if trainer.is_global_zero`?"
        ) from error


_progress: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of this process's calls of :func:`announce_progress`, for each default process group that was created."""

_LEFT = 2**62
"""The number of calls that a process announces when it ends, so that no rank waits for it."""


def announce_progress() -> None:
    """Announce to the other ranks that this rank has begun an operation that all ranks begin, such as a step.

    The announcement is written into the store, and is not a collective.
    """
    if not _has_others():
        return
    group = default_group()
    if not _progress:
        atexit.register(_leave)
    _progress[group] = _progress.get(group, 0) + 1
    _write_progress(_progress[group])


_SECONDS_TO_LEAVE = 30.0
"""Seconds for which the process that hosts the store waits, at its end, for the others to end."""


def _leave() -> None:
    with suppress(Exception):  # The process that hosts the store may have ended.
        if dist.is_initialized():
            _write_progress(_LEFT)
            if dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                _wait_for_others_to_leave()


def _wait_for_others_to_leave() -> None:
    """Wait until the other ranks end, because they could not use the store any more after this process has ended.

    A process that ends by an error does not wait, as the others may wait for it.
    """
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    while not hasattr(sys, "last_value") and time.monotonic() < deadline:
        if all(_progress_of(rank) == _LEFT for rank in range(dist.get_world_size())):
            return
        time.sleep(0.05)


def _write_progress(progress: int) -> None:
    default_store().set(f"lightning_dist/progress/{dist.get_rank()}", str(progress))


def timed_barrier_unless_missed(what: str, timeout_s: float = 1800.0) -> None:
    """Wait until every rank has called this, but not for ranks that have called :func:`announce_progress` instead.

    Args:
        what: Description, for the message, of what the ranks are about to do together.
        timeout_s: Seconds to wait for ranks that have not gone on.

    Raises:
        OtherRankError: If a rank has gone on without calling this, has ended, or does not call this in time.
    """
    if not _has_others():
        return
    group, store = default_group(), default_store()
    arrivals = _arrivals.setdefault(group, Counter())
    arrivals[what] += 1
    place = f"lightning_dist/barrier/{what}/{arrivals[what]}"
    keys = [f"{place}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    num_here = store.add(place, 1)
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while num_here < len(keys):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)
        num_here = store.add(place, 0)
        if num_here == len(keys) or pause_s < 0.25:
            continue
        own = _progress.get(group, 0)
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        # A rank may have arrived and gone on after the check above, so its key is checked again after its progress.
        missing = [rank for rank in late if _progress_of(rank) > own and not store.check([keys[rank]])]
        if missing or time.monotonic() > deadline:
            did = "has gone on without it" if missing else f"did not call it within {timeout_s:.0f} s"
            raise OtherRankError(
                f"{what}: rank {', '.join(map(str, missing or late))} {did}. Every rank must call it,"
                " as each has a part; is it under `if trainer.is_global_zero`?"
            )


def _progress_of(rank: int) -> int:
    store, key = default_store(), f"lightning_dist/progress/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def check_agreement(what: str, text: str) -> None:
    """Check that ``text`` is the same on all ranks, because ranks with different texts might hang.

    This is a collective over all processes.

    Args:
        what: Singular noun that names the object described by ``text``, for the message.
        text: This rank's description of it.

    Raises:
        OtherRankError: On all ranks, if the texts differ; the message shows the first difference.
    """
    texts = gather_objects(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            start = next((i for i, (a, b) in enumerate(zip(texts[0], other, strict=False)) if a != b), len(other))
            first, second = (found[max(0, start - 80) : start + 80] for found in (texts[0], other))
            raise OtherRankError(
                f"{what} is not the same on all ranks. It is made from the model and from the first training step,"
                " which must be the same on every rank: does either depend on the rank, on random numbers, or on what"
                f" is in this rank's part of the batch? Rank 0: ...{first}... Rank {rank}: ...{second}..."
            )


def union_over_ranks(names: Iterable[str]) -> list[str]:
    """Return the names that any rank gives, in the same order on all ranks. This is a collective over all processes.

    Where a plan depends on the names, ranks with other names would call other collectives, and hang.

    Args:
        names: This rank's names.
    """
    return sorted({name for of_rank in gather_objects(list(names)) for name in of_rank})
