"""Check the folder of the checkpoints: whether all ranks share it, how fast it is, and how much fits into it."""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.format import bandwidth_text, seconds_text
from lightning_dist.run.doctor.ranks import Ranks

__all__ = ["check_storage", "file_system_of", "judge_storage", "limit_s"]

_NAME = "checkpoint folder"

LEAST_FREE_BYTES = 10 * 2**30
"""A checkpoint with float32 weights and the two moments of AdamW has 12 bytes for each parameter, so that this much
does not hold one of a model with a billion parameters."""

LEAST_BYTES_PER_S = 100e6
"""The bandwidth of a single hard disk."""

LARGEST_FSYNC_S = 0.1
"""Ten times what a hard disk takes. A save flushes each file and some folders before the next one may begin."""

_BYTES_OF_RANK, _BYTES_OF_ALL = 2**26, 2**32
_CHUNK_BYTES = 2**22
_SECONDS_OF_WRITING = 20.0
_NUM_FSYNCS = 5

_VISIBLE_WITHIN_S = 5.0
"""Seconds for which a network file system may keep an old list of files (nfs(5): acregmin, acdirmin)."""

_IN_MEMORY = ("tmpfs", "ramfs")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _Figures:
    """Hold what one rank has measured.

    Args:
        file_system: Type of the file system, such as ``"nfs4"``; empty: unknown.
        free_bytes: Bytes that this process may still write.
        written: Bytes that it has written.
        write_s: Seconds until they were on the disk.
        fsync_s: Median of the seconds that flushing a few bytes takes.
        read_s: Seconds for reading what the next rank has written.
        error: Why writing or reading failed; empty if it did not.
        is_full: Whether this was for lack of space.
    """

    file_system: str
    free_bytes: int
    written: int = 0
    write_s: float = 0.0
    fsync_s: float = 0.0
    read_s: float = 0.0
    error: str = ""
    is_full: bool = False


def limit_s(examination: Examination) -> float:
    """Return after how many seconds the check counts as hanging."""
    return 300.0 + examination.ranks.world_size


def check_storage(examination: Examination) -> list[Finding]:
    """Write and read files in the folder on all ranks at the same time, and remove them."""
    ranks, place = examination.ranks, str(examination.checkpoint_folder)
    if "://" in place:
        return [
            Finding(
                _NAME,
                "skip",
                f"{place} is in an object store, which was not measured. Every rank reaches it by its URL.",
                "Whether the credentials are right, the first save of a run shows; try one with --trainer.max_steps=1.",
            )
        ]
    own = (str(Path(place).absolute()), f".lightning-dist-doctor-{uuid.uuid4().hex[:12]}")
    root, name = ranks.gather(own)[0]  # As in a run, all ranks use the path of rank 0.
    folder = Path(root)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    error = _make(folder / name) if ranks.rank == 0 else ""
    try:
        if error := ranks.gather(error)[0]:
            return [_unwritable(folder, ranks, error)]
        sees = ranks.gather(_is_seen(folder / name))
        if not all(sees):
            return [_not_shared(folder, ranks, [rank for rank, seen in enumerate(sees) if not seen])]
        figures = _measure(folder / name, ranks)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
            for path in made:
                with suppress(OSError):
                    path.rmdir()
    return judge_storage(folder, figures, ranks)


def _make(folder: Path) -> str:
    """Make a folder, and return why it cannot be made; empty if it was."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return ""


def _is_seen(folder: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _unwritable(folder: Path, ranks: Ranks, error: str) -> Finding:
    return Finding(
        _NAME,
        "fail",
        f"{ranks.named([0])} cannot write to {folder}: {error}. No checkpoint can be saved there.",
        "Give this user the right to write there and free some space, or save to another folder"
        " (--checkpoint-folder checks it).",
    )


def _not_shared(folder: Path, ranks: Ranks, blind: Sequence[int]) -> Finding:
    return Finding(
        _NAME,
        "fail",
        f"{folder} is not the same folder on all ranks: {ranks.named(blind)} does not see there what"
        f" {ranks.named([0])} has written. Every rank writes a part of a checkpoint, so that none would be complete.",
        "Save to a folder of a file system that all nodes and containers mount at the same path, or to an object store"
        " such as s3://.",
    )


def _measure(folder: Path, ranks: Ranks) -> list[_Figures]:
    """Return the figures of all ranks, which write and read at the same time. This is a collective over all ranks."""
    free = shutil.disk_usage(folder).free
    own = _Figures(file_system_of(folder), free)
    num_bytes = max(min(_BYTES_OF_RANK, _BYTES_OF_ALL // ranks.world_size), _CHUNK_BYTES)
    ranks.gather(None)
    own = _written(own, folder / str(ranks.rank), num_bytes)
    before = ranks.gather(own)
    if any(figures.error for figures in before):
        return before
    peer = (ranks.rank + 1) % ranks.world_size
    return ranks.gather(_read(own, folder / str(peer), before[peer].written))


def _written(figures: _Figures, path: Path, num_bytes: int) -> _Figures:
    """Write a file of up to ``num_bytes``, and flush a few bytes several times."""
    chunk = os.urandom(_CHUNK_BYTES)  # A file system that compresses would be too fast with anything else.
    written = 0
    try:
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            while written < num_bytes and time.perf_counter() - start < _SECONDS_OF_WRITING:
                written += file.write(chunk)
            os.fsync(file.fileno())
        write_s = time.perf_counter() - start
        times = []
        with path.with_name(f"{path.name}-small").open("wb", buffering=0) as file:
            for _ in range(_NUM_FSYNCS):
                start = time.perf_counter()
                file.write(chunk[:4096])
                os.fsync(file.fileno())
                times.append(time.perf_counter() - start)
    except OSError as error:
        return _Figures(
            figures.file_system, figures.free_bytes, error=f"writing: {error}", is_full=error.errno in _FULL
        )
    return _Figures(figures.file_system, figures.free_bytes, written, write_s, median(times))


def _read(own: _Figures, path: Path, num_bytes: int) -> _Figures:
    """Read the file of another rank, which is not in this node's cache if that rank is on another node."""
    error, num_read = "", 0
    start = time.perf_counter()
    try:
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while part := file.read(_CHUNK_BYTES):
                num_read += len(part)
    except OSError as raised:
        error = f"reading: {raised}"
    if not error and num_read != num_bytes:
        error = f"reading: {path} has {num_read} of the {num_bytes} bytes that another rank has written"
    seconds = time.perf_counter() - start
    return _Figures(own.file_system, own.free_bytes, own.written, own.write_s, own.fsync_s, seconds, error)


def file_system_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system of a folder, such as ``"ext4"``; empty: unknown.

    Args:
        folder: Path of the folder.
        mounts: File in which the kernel lists the mounts, as proc(5) describes it.
    """
    found, longest = "", -1
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        # Of two mounts at the same place, the later one covers the other.
        if folder.resolve().is_relative_to(point) and len(point) >= longest:
            found, longest = after.split()[0], len(point)
    return found


def judge_storage(folder: Path, of_ranks: Sequence[_Figures], ranks: Ranks) -> list[Finding]:
    """Judge what the ranks have measured."""
    wrong = {rank: figures.error for rank, figures in enumerate(of_ranks) if figures.error}
    free = min(figures.free_bytes for figures in of_ranks)
    if any(figures.is_full for figures in of_ranks):
        return [
            Finding(
                _NAME,
                "fail",
                f"{folder} is full: {ranks.named(wrong)} could not write {_BYTES_OF_RANK // 2**20} MiB, and"
                f" {free / 2**20:,.0f} MiB are free. No checkpoint fits.",
                "Free some space (a quota counts as well), keep fewer checkpoints by the strategy's"
                " `checkpoint.keep_last`, or save to another folder.",
            )
        ]
    if wrong:
        rank, error = next(iter(wrong.items()))
        return [
            Finding(
                _NAME,
                "fail",
                f"{ranks.named(wrong)} cannot use {folder}; rank {rank}, {error}. Every rank writes and reads"
                " checkpoints.",
                "Mount the folder alike on all nodes, and give the user of every rank the right to write.",
            )
        ]
    write = sum(figures.written for figures in of_ranks) / max(figures.write_s for figures in of_ranks)
    read = sum(figures.written for figures in of_ranks) / max(figures.read_s for figures in of_ranks)
    fsync_s = max(figures.fsync_s for figures in of_ranks)
    kind = of_ranks[0].file_system
    seen = (
        f"{folder} ({kind or 'a file system of unknown type'}) is seen by all ranks. Together they write"
        f" {bandwidth_text(write)} and read {bandwidth_text(read)}, flushing a few bytes takes {seconds_text(fsync_s)},"
        f" and {free / 2**30:,.1f} GiB are free."
    )
    advice = []
    if kind in _IN_MEMORY:
        advice.append(f"{kind} is in memory, and is lost when the node stops. Save to a disk.")
    if free < LEAST_FREE_BYTES:
        advice.append(
            f"Free some space: a checkpoint with AdamW has 12 bytes for each parameter, so that this is less than one"
            f" of a model with {free / 12e6:,.0f} million parameters."
        )
    if write < LEAST_BYTES_PER_S:
        advice.append(
            "This is slower than one hard disk. Save less often, or asynchronously (`checkpoint.asynchronous`), or to a"
            " faster disk."
        )
    if fsync_s > LARGEST_FSYNC_S:
        advice.append("Flushing takes long, which each save waits for. Look for other programs that use this disk.")
    return [Finding(_NAME, "warn" if advice else "pass", seen, " ".join(advice))]
