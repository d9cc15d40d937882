"""Record which operations each rank begins, and compare the orders in which ranks have begun them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

__all__ = ["FOLDER", "Entry", "Log", "find_disorder"]

FOLDER = "LIGHTNING_DIST_TESTS_NCCL_LOG"
"""Environment variable with the folder of one file per rank, in which the rank writes what it begins."""

_LEFT = "left"


class Entry(NamedTuple):
    """Describe an operation that a rank has begun.

    Args:
        group: Name of the process group.
        ranks: Global ranks of the group, with commas between them.
        thread: Name of the thread that has begun the operation.
        what: The operation with its number in the group, sizes and dtypes.
        site: The line that has begun it.
    """

    group: str
    ranks: str
    thread: str
    what: str
    site: str

    @property
    def is_message(self) -> bool:
        """Return whether the operation is a send, a receive, or a batch of them."""
        return " messages " in self.what


class Log:
    """Write what this rank begins into a file, which the other ranks and the test can read at any time.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        folder = os.environ.get(FOLDER)
        self._folder = Path(folder) if folder else None
        self._file = open(self._folder / str(rank), "a", buffering=1) if self._folder else None  # noqa: SIM115

    def add(self, entry: Entry) -> None:
        """Record an operation that this rank begins."""
        if self._file is not None:
            self._file.write("\t".join(entry) + "\n")

    def leave(self, group: str) -> None:
        """Record that this rank has left a process group, and begins nothing more in it."""
        if self._file is not None and not self._file.closed:
            self._file.write(f"{_LEFT}\t{group}\n")

    def latest(self, ranks: Sequence[int]) -> str:
        """Return what each of some ranks has begun last."""
        found = []
        for rank in ranks:
            begun = [entry for line in self._lines(rank) if (entry := _parse(line)) is not None]
            last = f"{begun[-1].what} of {begun[-1].group} at {begun[-1].site}" if begun else "nothing"
            found.append(f"rank {rank}: {last}")
        return "; ".join(found)

    def have_left(self, ranks: Sequence[int], group: str) -> list[int]:
        """Return those of some ranks that have left a process group."""
        return [rank for rank in ranks if f"{_LEFT}\t{group}" in self._lines(rank)]

    def _lines(self, rank: int) -> list[str]:
        path = self._folder / str(rank) if self._folder else None
        return path.read_text().splitlines() if path is not None and path.exists() else []


def _parse(line: str) -> Entry | None:
    parts = line.split("\t")
    return Entry(*parts) if len(parts) == len(Entry._fields) else None


def call_site() -> str:
    """Return file and line of the innermost caller outside of torch and of this folder."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/nccl_rules/" not in path and "/torch/" not in path and "contextlib" not in path:
            return f"{'/'.join(path.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def thread_name() -> str:
    """Return ``"main"``, also for threads of autograd, which run while the main thread waits; else the thread's name.

    The thread that compresses gradients on a CPU stands for a stream of an accelerator.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread() or isinstance(thread, threading._DummyThread):
        return "main"
    return thread.name


def find_disorder(folder: Path) -> str | None:
    """Return a sentence on two ranks that have begun the operations of their common groups in different orders.

    NCCL may hang if two ranks begin the same operations of two groups in different orders. Messages are not compared,
    since the groups themselves run them in order. Operations that only one rank begins are found by its wait.

    Args:
        folder: The folder of the ranks' files.

    Returns:
        The sentence; None if all orders are the same.
    """
    logs = {
        int(path.name): [entry for line in path.read_text().splitlines() if (entry := _parse(line)) is not None]
        for path in folder.iterdir()
    }
    for first, second in combinations(sorted(logs), 2):
        threads = {entry.thread for rank in (first, second) for entry in logs[rank]}
        for thread in sorted(threads):
            pair = [_common(logs[rank], first, second, thread) for rank in (first, second)]
            for one, other in zip(*pair, strict=False):
                if (one.group, one.what) != (other.group, other.what):
                    begun = [f"{e.what} of {e.group} at {e.site}" for e in (one, other)]
                    return (
                        "Two ranks have begun the operations of their groups in different orders:"
                        f" rank {first} has begun {begun[0]} when rank {second} has begun {begun[1]}."
                    )
    return None


def _common(entries: Sequence[Entry], first: int, second: int, thread: str) -> list[Entry]:
    """Return the collectives that a thread has begun in groups of which both ranks are members."""
    both = {str(first), str(second)}
    return [e for e in entries if e.thread == thread and not e.is_message and both <= set(e.ranks.split(","))]
