"""A process's file operations: counted, recorded, and cut off by a kill."""

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
    """Inside, ``before`` and ``after`` are called around every operation of :data:`NAMES`, and of ``renameat2``.

    Args:
        before: Called with the operation's name and arguments.
        after: Called with its result, too, if it did not raise.
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
    """Inside, this process is killed before its ``index``-th operation, or, a half of a write later, in it.

    Gives the names of the operations so far.
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
