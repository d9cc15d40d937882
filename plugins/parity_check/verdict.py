"""Let rank 0 work alone, and give its result or its error to the other ranks, which wait for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_dist._compat import default_group, default_store, without_process_group
from lightning_dist.mesh.consensus import OtherRankError
from lightning_dist.plugins.parity_check.report import Report

__all__ = ["on_first_rank"]

_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of this process's calls of :func:`on_first_rank`, for each default process group that was created."""

_PERIOD = timedelta(seconds=30)


def on_first_rank(make: Callable[[], Report]) -> Report:
    """Call ``make`` on rank 0, without a process group, and return its result on all ranks.

    The other ranks wait in the store, and not in a collective, whose time is limited. If rank 0 dies, so does the
    store, and they raise an error.

    Args:
        make: Function that makes the report.

    Raises:
        OtherRankError: On the other ranks, if ``make`` raises an error.
    """
    group, store = default_group(), default_store()
    _calls[group] = _calls.get(group, 0) + 1
    key = f"lightning_dist/check/{_calls[group]}"
    if dist.get_rank() == 0:
        try:
            with without_process_group():
                report = make()
        except BaseException as error:
            _send_to_others(store, key, f"{type(error).__name__}: {error}")
            raise
        _send_to_others(store, key, report)
        return report
    while not store.check([key]):
        with suppress(dist.DistStoreError):  # It is raised when the time is over.
            store.wait([key], _PERIOD)
    result = pickle.loads(store.get(key))
    store.set(f"{key}/{dist.get_rank()}", "")
    if isinstance(result, str):
        raise OtherRankError(f"The computation in one process failed on rank 0: {result}")
    assert isinstance(result, Report)
    return result


def _send_to_others(store: dist.Store, key: str, result: Report | str) -> None:
    """Write ``result`` into the store, and wait until the other ranks have read it, since this process holds it."""
    store.set(key, pickle.dumps(result))  # type: ignore[arg-type]  # The stub leaves out bytes.
    with suppress(dist.DistStoreError):  # A rank that has died does not read it.
        store.wait([f"{key}/{rank}" for rank in range(1, dist.get_world_size())], _PERIOD)
