"""Intercept the file operations of this process, in order to count or record them, or to kill the process at one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dist.checkpoint import file_system

__all__ = ["NAMES", "intercepted", "kill_at"]

NAMES = (
    "open",
    "write",
    "fsync",
    "close",
    "rename",
    "replace",
    "mkdir",
    "symlink",
    "unlink",
    "rmdir",
    "truncate",
    "pwrite",
)


@contextmanager
def intercepted(
    before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Call ``before`` and ``after`` around each operation of :data:`NAMES` and each ``renameat2`` in this context.

    Args:
        before: Function that is called with the operation's name and positional arguments.
        after: Function that is called with the name, the arguments and the result, unless the operation has raised an
            error.
    """

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            before(name, args)
            result = function(*args, **kwargs)
            after(name, args, result)
            return result

        return operation

    originals = {name: getattr(os, name) for name in NAMES}
    rename = file_system._rename
    for name, function in originals.items():
        setattr(os, name, wrap(name, function))
    file_system._rename = wrap("renameat2", rename)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(os, name, function)
        file_system._rename = rename


@contextmanager
def kill_at(index: int) -> Iterator[list[str]]:
    """Kill this process before its ``index``-th operation in this context; half of a write is done before that.

    The context's value is the list of the names of the operations so far.
    """
    done: list[str] = []
    write = os.write

    def before(name: str, args: tuple[Any, ...]) -> None:
        if len(done) == index:
            if name == "write":
                file, data = args
                write(file, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(name)

    with intercepted(before, lambda name, args, result: None):
        yield done
