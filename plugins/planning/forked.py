"""Call functions in processes that are forked from this one, so that they leave nothing behind in it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar, cast

__all__ = ["in_fork", "in_forks"]

_Result = TypeVar("_Result")


def in_fork(function: Callable[[], _Result]) -> _Result:
    """Call ``function`` in a forked process, and return its result.

    Args:
        function: Function whose result can be pickled. It may be a closure, since a forked process has the same memory.

    Raises:
        RuntimeError: If the process ends by a signal, such as that of the kernel when memory runs out, or raises an
            error that cannot be pickled.
        Exception: The error that ``function`` raises.
    """
    ((_, result, error),) = in_forks([function], 1)
    if error is not None:
        raise error
    return cast(_Result, result)


def in_forks(
    functions: Sequence[Callable[[], _Result]], at_once: int
) -> Iterator[tuple[int, _Result | None, BaseException | None]]:
    """Call functions in forked processes, and yield their outcomes as they end.

    Args:
        functions: Functions as for :func:`in_fork`.
        at_once: Number of processes that run at the same time.

    Returns:
        Iterator over the index of a function, its result, and its error, one of which is None.
    """
    context = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    waiting = list(enumerate(functions))
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, function = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_call, args=(function, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = index, process
            for receiver in cast(list[Connection], wait(list(running))):
                index, process = running.pop(receiver)
                yield index, *_outcome(receiver, process)
    finally:
        for _, process in running.values():
            process.kill()


def _outcome(receiver: Connection, process: ForkProcess) -> tuple[Any, BaseException | None]:
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        return None, RuntimeError(f"The process ended with exit code {process.exitcode} and without a result.")
    process.join()
    return result, error


def _call(function: Callable[[], Any], sender: Connection) -> None:
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
