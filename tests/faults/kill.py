"""Kill a rank by SIGKILL at every operation of a save, and check that the old or the new checkpoint is complete."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.faults.operations import intercepted, kill_at
from tests.faults.saves import found, save, with_ranks

__all__ = ["campaign", "num_operations"]


def num_operations(folder: Path, num_ranks: int, overwrites: bool) -> list[int]:
    """Return the number of file operations in a save, for each rank."""
    counts = folder / "counts"
    counts.mkdir(parents=True)

    def count(rank: int) -> None:
        done: list[str] = []
        with intercepted(lambda name, args: done.append(name), lambda *_: None):
            save(folder / "run.ckpt", 2)
        (counts / str(rank)).write_text(str(len(done)))

    if overwrites:
        save(folder / "run.ckpt", 1)
    assert with_ranks(num_ranks, folder / "store", count) == [0] * num_ranks
    return [int((counts / str(rank)).read_text()) for rank in range(num_ranks)]


def campaign(folder: Path, num_ranks: int, overwrites: bool, stride: int = 1) -> Counter[str]:
    """Kill each rank at every ``stride``-th operation of a save, and read the checkpoint that is left.

    Args:
        folder: Folder to work in.
        num_ranks: Number of processes that save one checkpoint.
        overwrites: Whether there is already a checkpoint at the path.
        stride: Distance between the operations that are tried; 1 tries all.

    Returns:
        Counts of how often the previous checkpoint was found (or none, if there was none), and how often the new one.

    Raises:
        AssertionError: If anything else was found.
    """
    outcomes: Counter[str] = Counter()
    for rank, index in _points(folder / "count", num_ranks, overwrites, stride):
        path = folder / "trial" / "run.ckpt"
        shutil.rmtree(folder / "trial", ignore_errors=True)
        (folder / "trial").mkdir(parents=True)
        if overwrites:
            save(path, 1)

        def killed(this_rank: int, path: Path = path, rank: int = rank, index: int = index) -> None:
            if this_rank == rank:
                with kill_at(index):
                    save(path, 2)
            else:
                save(path, 2)

        exits = with_ranks(num_ranks, folder / "trial" / "store", killed)
        assert exits[rank] == -signal.SIGKILL, f"rank {rank} was not killed at operation {index}: {exits}"
        number = found(path)
        assert number in ((1, 2) if overwrites else (None, 2)), f"rank {rank}, operation {index}: found {number}"
        outcomes["new" if number == 2 else "previous"] += 1
        # The files that the killed save left must not disturb the next save.
        save(path, 3)
        assert found(path) == 3
    return outcomes


def _points(folder: Path, num_ranks: int, overwrites: bool, stride: int) -> Iterator[tuple[int, int]]:
    for rank, count in enumerate(num_operations(folder, num_ranks, overwrites)):
        for index in range(0, count, stride):
            yield rank, index
