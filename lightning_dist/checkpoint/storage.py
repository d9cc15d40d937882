"""What a place for checkpoints has to offer, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from lightning_dist.checkpoint.manifest import FileEntry, new_digest

__all__ = ["CheckpointStorage", "NewFile", "Reader"]


class Reader(Protocol):
    """The files of a checkpoint, all of the same one, also when the path gets another one in the meantime.

    To be used by several threads.
    """

    def size(self, name: str) -> int:
        """Of the file, in bytes. Raises FileNotFoundError."""

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        """Fill one buffer after another with the file's bytes from ``start`` on; returns how many there were."""


class CheckpointStorage(Protocol):
    """A path, at which a checkpoint is or may be. One save is between ``begin`` and ``commit`` or ``abort``."""

    def lock(self) -> Callable[[], None]:
        """Keep other runs from saving to the same folder, and remove what runs that died left in it; on the first rank.

        Returns:
            What gives the folder free.

        Raises:
            CheckpointError: If another run has it.
        """

    def begin(self, save_id: str) -> None:
        """Make what a save needs; on the first rank, before the others write."""

    def prefix(self, save_id: str) -> str:
        """What the names of a save's files begin with."""

    def create(self, save_id: str, name: str) -> NewFile:
        """A new file of the save; on any rank. Raises FileNotFoundError where another rank's ``begin`` is not seen."""

    def commit(self, save_id: str, manifest: bytes) -> None:
        """Put the save at the path; on the first rank, when all files are closed. Returns when it is durable."""

    def abort(self, save_id: str) -> None:
        """Remove what the save wrote; on the first rank."""

    def exists(self) -> bool:
        """Whether there is anything at the path."""

    def is_checkpoint(self) -> bool:
        """Whether there is a manifest."""

    def open(self) -> AbstractContextManager[Reader]:
        """Its files, to read."""

    def remove(self) -> None:
        """Remove what is at the path: first as a checkpoint, at once, then its files."""

    def free_bytes(self) -> int | None:
        """How much more can be written; None: nobody knows."""

    def children(self) -> list[str]:
        """The paths of the checkpoints in it, if it is a folder of checkpoints."""


class NewFile:
    """A file of a save: counts and digests what is written.

    Args:
        name: As the manifest will have it.
        write: Appends all of what it is given.
        finish: Makes what was written durable, and closes, in any case.
        abandon: Closes only.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[bytes | memoryview], Any],
        finish: Callable[[], Any],
        abandon: Callable[[], Any],
    ) -> None:
        self.name = name
        self._write = write
        self._finish = finish
        self._abandon = abandon
        self._size = 0
        self._digest = new_digest()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        self._write(data)
        self._digest.update(data)
        self._size += len(data)

    def write_all(self, data: bytes | memoryview) -> FileEntry:
        """Make ``data`` the file's content."""
        try:
            self.write(data)
        except BaseException:
            self.abandon()
            raise
        return self.close()

    def close(self) -> FileEntry:
        """Make the file durable, close it, and say what is in it."""
        self._finish()
        return FileEntry(self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file of a save that failed."""
        with suppress(OSError):
            self._abandon()
