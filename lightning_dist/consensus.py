"""Errors that end all ranks: what goes wrong on one is raised on every one, at once, instead of a hang."""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = [
    "OtherRankError",
    "check_agreement",
    "go_on",
    "raise_on_all_ranks",
    "timed_barrier",
    "timed_barrier_unless_missed",
]


class OtherRankError(RuntimeError):
    """Another rank failed in what all ranks do together; the text names it and has its error."""


@contextmanager
def raise_on_all_ranks(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the body on all ranks; where it raises on any, raise on all. A collective over ``group``.

    The body itself must not hold collectives that a failing rank would leave the others waiting in.

    Args:
        what: What the ranks do, for the message: ``"reading the checkpoint"``.
        group: The ranks; None: all processes.

    Raises:
        OtherRankError: On the ranks that were fine, where another was not. Failing ranks raise their own error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        texts: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, f"{type(error).__name__}: {error}" if error else None, group)
        failed = [(rank, text) for rank, text in enumerate(texts) if text]
        if failed and error is None:
            rank, text = failed[0]
            raise OtherRankError(f"{what} failed on {len(failed)} of {len(texts)} ranks; rank {rank}: {text}")
    if error is not None:
        raise error


_arrivals: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""How often, in the processes' default group, which a process may make anew with others."""


def timed_barrier(what: str, timeout_s: float = 60.0, ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank is here, but never for ever: unlike a barrier, it names who did not come.

    Args:
        what: What the ranks are about to do together, for the message.
        timeout_s: Seconds to wait for the others.
        ranks: Those who do it, this one among them; None: all.

    Raises:
        OtherRankError: If a rank did not arrive in time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    together_with = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    arrivals = _arrivals.setdefault(dist.distributed_c10d._get_default_group(), Counter())
    arrivals[what] += 1
    store = dist.distributed_c10d._get_default_store()
    keys = [f"lightning_dist/barrier/{what}/{arrivals[what]}/{rank}" for rank in together_with]
    store.set(keys[together_with.index(dist.get_rank())], "")
    deadline = time.monotonic() + timeout_s
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except (RuntimeError, dist.DistStoreError) as error:
        missing = [rank for rank, key in zip(together_with, keys, strict=True) if not store.check([key])]
        raise OtherRankError(
            f"{what}: rank {', '.join(map(str, missing))} did not arrive within {timeout_s:.0f} s. Every rank must do"
            " this; is it under `if trainer.is_global_zero`?"
        ) from error


_progress: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How often this process has gone on, in its default group."""

_LEFT = 2**62
"""The progress of a process that has ended."""


def go_on() -> None:
    """Let other ranks know that this one has begun what all of them begin, such as a step. No collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    group = dist.distributed_c10d._get_default_group()
    if not _progress:
        atexit.register(_leave)
    _progress[group] = _progress.get(group, 0) + 1
    _tell(_progress[group])


def _leave() -> None:
    with suppress(Exception):  # the store may have ended with the process that holds it
        if dist.is_initialized():
            _tell(_LEFT)


def _tell(progress: int) -> None:
    dist.distributed_c10d._get_default_store().set(f"lightning_dist/progress/{dist.get_rank()}", str(progress))


def timed_barrier_unless_missed(what: str, timeout_s: float = 1800.0) -> None:
    """Wait until every rank is here, as long as it takes; but not for one that has gone on (see :func:`go_on`).

    Args:
        what: What the ranks are about to do together, for the message.
        timeout_s: Seconds to wait for ranks that have not.

    Raises:
        OtherRankError: If a rank has gone on without it, or has ended.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    group, store = dist.distributed_c10d._get_default_group(), dist.distributed_c10d._get_default_store()
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
        # One that is late may come after it was asked, and go on.
        missing = [rank for rank in late if _progress_of(rank) > own and not store.check([keys[rank]])]
        if missing or time.monotonic() > deadline:
            raise OtherRankError(
                f"{what}: rank {', '.join(map(str, missing or late))} has gone on without it. Every rank must call it,"
                " as each has a part; is it under `if trainer.is_global_zero`?"
            )


def _progress_of(rank: int) -> int:
    store, key = dist.distributed_c10d._get_default_store(), f"lightning_dist/progress/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def check_agreement(what: str, text: str) -> None:
    """Compare ``text`` over all ranks, which would wait for each other in vain where it differs. A collective.

    Args:
        what: What it describes, for the message: a noun in the singular.
        text: The description.

    Raises:
        OtherRankError: On all ranks, if it differs; the text has the first difference.
    """
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            start = next((i for i, (a, b) in enumerate(zip(texts[0], other, strict=False)) if a != b), len(other))
            first, second = (found[max(0, start - 80) : start + 80] for found in (texts[0], other))
            raise OtherRankError(
                f"{what} is not the same on all ranks. It is made from the model and from the first training step,"
                " which must be the same on every rank: does either depend on the rank, on random numbers, or on what"
                f" is in this rank's part of the batch? Rank 0: ...{first}... Rank {rank}: ...{second}..."
            )
