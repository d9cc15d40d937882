"""Keep what a run logs in a local file until MLflow has it."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

__all__ = ["SUFFIX", "Entry", "Spool", "SpoolInUseError", "find_spools"]

SUFFIX = ".spool.jsonl"
_CHUNK_BYTES = 2**20
_WRITER, _READER, _CHANGE = range(3)
"""Bytes of the file whose locks say that a process writes to it, that one sends from it, and that one is changing it. A
lock has nothing to do with what a byte contains."""
_LOCKS = {"both": (_WRITER, 2), "writer": (_WRITER, 1), "reader": (_READER, 1)}
"""First byte and number of bytes that a process locks, depending on whether it writes, sends or does both."""

Entry = Mapping[str, Any]
"""One thing that was logged, as plain JSON with a single key, such as ``{"params": {"lr": "0.1"}}``; see
:class:`~lightning_dist.plugins.loggers.delivery.Delivery` for the keys."""


class SpoolInUseError(RuntimeError):
    """Report that a running process is writing to a spool and sending from it."""


class Spool:
    """Append entries to a file, and read those that MLflow has not got yet.

    The first line is a header, which says to which run the entries belong. Each further line is an entry. What MLflow
    has is cut off the file as soon as nothing else is left, so that the file stays short while MLflow can be reached.
    The entries survive the death of the process, but the last seconds may be lost in a power failure, because nothing
    waits for the disk. One process at a time has a spool open, or one writes to it and one sends from it; threads may
    share it.

    Args:
        path: Path of the spool's file.
        header: Header of a new file; None: the file exists.
        role: Whether this process writes to it and sends from it, or another process does one of the two.

    Raises:
        SpoolInUseError: If another process has it open for the same.
        ValueError: If an existing file has no header.
        OSError: If it cannot be opened or written.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any] | None = None,
        role: Literal["both", "writer", "reader"] = "both",
    ) -> None:
        self.path = path
        if header is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if header is not None else 0), 0o644)
        self._lock = threading.Lock()
        try:
            # A lock of this kind ends with this process, also if a worker that it has forked lives on.
            first, number = _LOCKS[role]
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, number, first)
        except OSError as error:
            os.close(self._file)
            raise SpoolInUseError(f"{path} is in use by a running process, which sends it.") from error
        try:
            if header is not None:
                with self._changing():
                    self._write(_line(header))
            self.header, self._begin = self._read_header()
        except BaseException:
            self.close()
            raise
        self._sent = self._begin
        if role != "reader":  # The process that writes may just be writing the last line.
            self._cut_incomplete_line()

    @classmethod
    def for_reader(cls, path: Path) -> Spool | None:
        """Return the spool to which another process writes, or None if it has not written to it yet."""
        try:
            if path.stat().st_size == 0:
                return None
        except FileNotFoundError:
            return None
        return cls(path, role="reader")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep other threads and the process at the other end of the spool from changing the file in this context."""
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _CHANGE)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _CHANGE)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        with self._changing():
            first, newline, _ = os.pread(self._file, _CHUNK_BYTES, 0).partition(b"\n")
        try:
            header = json.loads(first)
            if not newline or not isinstance(header, dict):
                raise ValueError("no header")
        except ValueError as error:
            raise ValueError(f"{self.path} is not a spool of lightning-dist: its first line is no header.") from error
        return header, len(first) + 1

    def _cut_incomplete_line(self) -> None:
        """Cut off the end of a file whose last line was not written to its end, by a process that was killed."""
        size, end = self._size, b""
        while size > self._begin and not end.endswith(b"\n"):
            end = os.pread(self._file, 1, size - 1)
            size -= end != b"\n"
        os.ftruncate(self._file, size)

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries; if that fails, the file is as before.

        Raises:
            OSError: If they cannot be written, for example because the disk is full.
        """
        data = b"".join(map(_line, entries))
        with self._changing():
            self._write(data)

    def _write(self, data: bytes) -> None:
        size = self._size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            if len(view) < len(data):
                os.ftruncate(self._file, size)
            raise

    @property
    def _size(self) -> int:
        return os.fstat(self._file).st_size

    def pending(self) -> tuple[list[Entry], int]:
        """Return the oldest entries that MLflow has not got, about 1 MiB of them, and the position after them."""
        data = os.pread(self._file, _CHUNK_BYTES, self._sent)
        whole = data[: data.rfind(b"\n") + 1]
        if data and not whole and len(data) == _CHUNK_BYTES:  # One entry is longer, such as a configuration.
            data = os.pread(self._file, self._size - self._sent, self._sent)
            whole = data[: data.find(b"\n") + 1]
        return list(_parsed(whole)), self._sent + len(whole)

    def sent(self, position: int) -> None:
        """Record that MLflow has everything before ``position``."""
        with self._changing():
            self._sent = position
            if position >= self._size > self._begin:
                os.ftruncate(self._file, self._begin)
                self._sent = self._begin

    @property
    def is_empty(self) -> bool:
        """Return whether MLflow has everything."""
        with self._lock:
            return self._sent >= self._size

    @property
    def position(self) -> int:
        """Return the position in the file before which MLflow has everything."""
        return self._sent

    @property
    def num_metrics(self) -> int:
        """Return the number of values of metrics that MLflow has not got. This reads the file."""
        data = os.pread(self._file, self._size - self._sent, self._sent)
        return sum(len(entry.get("metrics", ())) for entry in _parsed(data))

    def remove(self) -> None:
        """Remove the file and close it."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the file and leave it where it is, for a later process."""
        os.close(self._file)


def find_spools(folder: Path) -> list[Path]:
    """Return the spools in ``folder`` and its subfolders, the oldest first."""
    return sorted(folder.rglob(f"*{SUFFIX}"), key=lambda path: path.name)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parsed(data: bytes) -> Iterator[Entry]:
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # A power failure has damaged the line.
            continue
        if isinstance(entry, dict):
            yield entry
