"""Allow a program to continue after an error that it caught only if all ranks had an error.

If a rank fails alone, the others still wait for it in a collective of the failed run. The next collective of the
failed rank would be matched with that one, or wait forever.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_dist._compat import default_group, default_store
from lightning_dist.mesh.consensus import OtherRankError

__all__ = ["announce_error", "check_that_all_ranks_failed"]

_num_errors: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of runs of this process that ended in an error, by default process group."""


def announce_error(error: BaseException) -> None:
    """Record in the store that a run has ended with ``error`` on this rank. This is not a collective."""
    if not dist.is_initialized():
        return
    group = default_group()
    _num_errors[group] = _num_errors.get(group, 0) + 1
    with suppress(dist.DistError):  # The process that hosts the store may have ended, which may be the error.
        default_store().set(_key(_num_errors[group], dist.get_rank()), f"{type(error).__name__}: {error}")


def check_that_all_ranks_failed(timeout_s: float) -> None:
    """Check, before a new run begins, that every rank has failed as often as this one.

    Args:
        timeout_s: Seconds to wait until the other ranks have failed.

    Raises:
        OtherRankError: If a rank has failed less often, so that it still waits for this one.
    """
    if not dist.is_initialized():
        return
    number = _num_errors.get(default_group(), 0)
    if number == 0:
        return
    keys = [_key(number, rank) for rank in range(dist.get_world_size())]
    try:
        default_store().wait(keys, timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistStoreError) as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not default_store().check([key])]
        own = default_store().get(keys[dist.get_rank()]).decode()
        raise OtherRankError(
            f"The last run failed on rank {dist.get_rank()} ({own}), but not on rank {', '.join(missing)}, which still"
            " waits for it. End the program if a run fails on some ranks only, or raise an error on all ranks."
        ) from error


def _key(number: int, rank: int) -> str:
    return f"lightning_dist/error/{number}/{rank}"
