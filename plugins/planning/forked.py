"""Call functions in processes of their own, so that they leave nothing behind in this one.

A process that is forked from this one begins at once, and has its objects. It cannot run a backward, however, if this
one has run one before, and it may wait for ever for a lock that another thread of this one held at the fork. A process
that is forked from a server has neither trouble: it has imported what it needs, and is given pickled objects.
"""

from __future__ import annotations

import gc
import multiprocessing
import operator
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

import psutil
import torch

__all__ = ["in_fork", "in_forks"]

_Result = TypeVar("_Result")


_CANNOT_BE_PICKLED = (
    "This process has run a backward, so that what is planned must be pickled for another process, and it cannot be:"
    " {}. Plan before the first backward, or define the classes and functions of the module and its data at the top"
    " level of a module."
)

_FIRST_FORK_S = 20
"""Seconds after which a process that tries a backward is held to be stuck."""

_STUCK_AFTER_S = 120
"""A process that uses no processor time for so many seconds is ended."""

_LOOK_EVERY_S = 10.0
"""Seconds after which processes that have not ended are looked at."""

_PRELOADED = "lightning_dist.plugins.planning.dry_run"


def in_fork(function: Callable[[], _Result]) -> _Result:
    """Call ``function`` in a process of its own, and return its result.

    The process is forked from this one, or from a server, which needs a function that can be pickled. The server comes
    first if this process has other threads, and alone if it has run a backward. A process that dies or is stuck is
    started once more, in the other way.

    Args:
        function: Function whose result can be pickled.

    Raises:
        RuntimeError: If the process ends by a signal, such as that of the kernel when memory runs out, uses no
            processor time for two minutes, or raises an error that cannot be pickled.
        Exception: The error that ``function`` raises.
    """
    ((_, result, error),) = in_forks([function], 1)
    if error is not None:
        raise error
    return cast(_Result, result)


def in_forks(
    functions: Sequence[Callable[[], _Result]], at_once: int
) -> Iterator[tuple[int, _Result | None, BaseException | None]]:
    """Call functions in processes of their own, and yield their outcomes as they end.

    Args:
        functions: Functions as for :func:`in_fork`.
        at_once: Number of processes that run at the same time.

    Returns:
        Iterator over the index of a function, its result, and its error, one of which is None.
    """
    contexts = _contexts() if functions else []
    running: dict[Connection, _Running] = {}
    waiting, repeated = list(enumerate(functions)), set[int]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, function = waiting.pop(0)
                try:
                    receiver, one = _started_in(contexts, index, function)
                except _NOT_PICKLED as error:
                    yield index, None, RuntimeError(_CANNOT_BE_PICKLED.format(error))
                    continue
                running[receiver] = one
            for receiver in _ended(running):
                one = running.pop(receiver)
                result, failure = one.outcome(receiver)
                if isinstance(failure, _DiedError) and one.index not in repeated:
                    # Libraries with threads of their own may not survive a fork, scripts may not survive an import.
                    contexts.sort(key=partial(operator.is_, one.context))
                    repeated.add(one.index)
                    waiting.insert(0, (one.index, functions[one.index]))
                    continue
                yield one.index, result, failure
    finally:
        for one in running.values():
            one.process.kill()


def _contexts() -> list[Any]:
    """Return the contexts in which processes may be started, the best one first."""
    fork, server = multiprocessing.get_context("fork"), multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([_PRELOADED])  # This has no effect on a server that runs already.
    receiver, process = _started(fork, _run_backward)
    if not receiver.poll(_FIRST_FORK_S):
        process.kill()
    if _Running(0, process, fork).outcome(receiver)[1] is not None:
        return [server]
    return [server, fork] if threading.active_count() > 1 else [fork, server]


_NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
"""The errors of functions that cannot be pickled."""


class _Running:
    """Hold a process that runs, and know whether it is stuck.

    Args:
        index: Index of its function.
        process: The process that runs the function.
        context: The context in which it was started.
    """

    def __init__(self, index: int, process: BaseProcess, context: Any) -> None:
        self.index = index
        self.process = process
        self.context = context
        self._is_stuck = False
        self._used = -1.0
        self._since = time.monotonic()

    def end_if_stuck(self) -> None:
        """End the process if it and its children have used no processor time for too long."""
        used = 0.0
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            for process in (own, *own.children(recursive=True)):
                times = process.cpu_times()
                used += times.user + times.system
        if used != self._used:
            self._used, self._since = used, time.monotonic()
        elif time.monotonic() - self._since > _STUCK_AFTER_S:
            self._is_stuck = True
            self.process.kill()

    def outcome(self, receiver: Connection) -> tuple[Any, BaseException | None]:
        """Return the result of the function and its error, one of which is None."""
        try:
            result, error = receiver.recv()
        except EOFError:
            self.process.join()
            if self._is_stuck:
                return None, _DiedError(f"The process used no processor time for {_STUCK_AFTER_S} s and was ended.")
            return None, _DiedError(f"The process ended with exit code {self.process.exitcode} and without a result.")
        self.process.join()
        return result, error


def _ended(running: Mapping[Connection, _Running]) -> list[Connection]:
    """Wait for the first processes that end, and end those that are stuck."""
    while not (ended := cast(list[Connection], wait(list(running), timeout=_LOOK_EVERY_S))):
        for one in running.values():
            one.end_if_stuck()
    return ended


class _DiedError(RuntimeError):
    """Report that a process has ended without a result."""


def _run_backward() -> None:
    """Run a backward, which torch refuses in a process that was forked from one that has run another."""
    torch.ones(1, requires_grad=True).sum().backward()


def _started_in(contexts: Sequence[Any], index: int, function: Callable[[], Any]) -> tuple[Connection, _Running]:
    """Start a process in the first context, or in a later one where the first cannot pickle the function."""
    for context in contexts:
        try:
            receiver, process = _started(context, function)
        except _NOT_PICKLED:
            if context is contexts[-1]:
                raise
            continue
        return receiver, _Running(index, process, context)
    raise AssertionError("There is always a context.")


def _started(context: Any, function: Callable[[], Any]) -> tuple[Connection, BaseProcess]:
    receiver, sender = context.Pipe(duplex=False)
    # The processes of data loaders are children of this one, which a daemon may not have.
    process = context.Process(target=_call, args=(function, sender), daemon=False)
    process.start()
    sender.close()
    return receiver, process


def _call(function: Callable[[], Any], sender: Connection) -> None:
    torch.set_num_threads(1)  # The threads of OpenMP do not survive a fork, and would be waited for.
    gc.freeze()  # Collections leave out what the parent has: to look at that takes longer than many functions.
    outcome: tuple[Any, BaseException | None]
    try:
        outcome = function(), None
    except BaseException as error:
        error.add_note(f"In the forked process:\n{traceback.format_exc()}")
        outcome = None, error
    try:
        message = pickle.dumps(outcome)
        pickle.loads(message)  # An error with other arguments than its text may not be made again from it.
    except Exception:
        message = pickle.dumps((None, RuntimeError(f"{type(outcome[1]).__name__}: {outcome[1]}")))
    sender.send_bytes(message)
    sender.close()
    os._exit(0)  # What the parent has registered for its exit is not for this process.
