"""Call functions in processes of their own, so that they leave nothing behind in this one.

A process that is forked from this one begins at once, and has its objects. It cannot run a backward, however, if this
one has run one before. A process that is forked from a server has imported what it needs, and is given pickled objects.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

import torch

__all__ = ["in_fork", "in_forks"]

_Result = TypeVar("_Result")


_CANNOT_BE_PICKLED = (
    "This process has run a backward, so that what is planned must be pickled for another process, and it cannot be:"
    " {}. Plan before the first backward, or define the classes and functions of the module and its data at the top"
    " level of a module."
)

_PRELOADED = "lightning_dist.plugins.planning.dry_run"


def in_fork(function: Callable[[], _Result]) -> _Result:
    """Call ``function`` in a process of its own, and return its result.

    The process is forked from this one. If this process has run a backward, or the forked process dies, it is forked
    from a server instead, which needs a function that can be pickled. A process that dies is started once more.

    Args:
        function: Function whose result can be pickled.

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
    """Call functions in processes of their own, and yield their outcomes as they end.

    Args:
        functions: Functions as for :func:`in_fork`.
        at_once: Number of processes that run at the same time.

    Returns:
        Iterator over the index of a function, its result, and its error, one of which is None.
    """
    context: Any = multiprocessing.get_context("fork")
    if functions and _outcome(*_started(context, _run_backward))[1] is not None:
        context = _server()
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    waiting, repeated = list(enumerate(functions)), set[int]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index, function = waiting.pop(0)
                try:
                    receiver, process = _started(context, function)
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    yield index, None, RuntimeError(_CANNOT_BE_PICKLED.format(error))
                    continue
                running[receiver] = index, process
            for receiver in cast(list[Connection], wait(list(running))):
                index, process = running.pop(receiver)
                result, failure = _outcome(receiver, process)
                if isinstance(failure, _DiedError) and index not in repeated:
                    # Libraries with threads of their own may not survive a fork of this process.
                    context = _server()
                    repeated.add(index)
                    waiting.insert(0, (index, functions[index]))
                    continue
                yield index, result, failure
    finally:
        for _, process in running.values():
            process.kill()


class _DiedError(RuntimeError):
    """Report that a process has ended without a result."""


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])  # This has no effect on a server that runs already.
    return context


def _run_backward() -> None:
    """Run a backward, which torch refuses in a process that was forked from one that has run another."""
    torch.ones(1, requires_grad=True).sum().backward()


def _started(context: Any, function: Callable[[], Any]) -> tuple[Connection, BaseProcess]:
    receiver, sender = context.Pipe(duplex=False)
    # The processes of data loaders are children of this one, which a daemon may not have.
    process = context.Process(target=_call, args=(function, sender), daemon=False)
    process.start()
    sender.close()
    return receiver, process


def _outcome(receiver: Connection, process: BaseProcess) -> tuple[Any, BaseException | None]:
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        return None, _DiedError(f"The process ended with exit code {process.exitcode} and without a result.")
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
