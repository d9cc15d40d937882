"""Define the interface of a storage for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from lightning_dist.checkpoint.manifest import FileEntry, new_digest

__all__ = ["CheckpointStorage", "NewFile", "Reader"]


class Reader(Protocol):
    """Read the files of one checkpoint, even if another checkpoint takes its path in the meantime.

    Several threads may use a reader at the same time.
    """

    def size(self, name: str) -> int:
        """Return the size of the file in bytes.

        Raises:
            FileNotFoundError: If the checkpoint has no file of this name.
        """

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        """Fill the buffers in turn with the file's bytes from ``start`` on, and return the number of bytes read."""


class CheckpointStorage(Protocol):
    """Store a checkpoint at one path, at which there may be none yet.

    A save calls ``begin``, then ``create`` for each file, and ends with ``commit`` or ``abort``.
    """

    def lock(self) -> Callable[[], None]:
        """Lock the path's folder against saves of other runs, and remove the leftovers of runs that died.

        The first rank calls this. It does nothing in an object store, which has no locks.

        Returns:
            Function that unlocks the folder.

        Raises:
            CheckpointError: If another run holds the lock.
        """

    def begin(self, save_id: str) -> None:
        """Prepare a save. The first rank calls this before any rank creates files.

        Args:
            save_id: Identifier of the save, which all of its methods are given.
        """

    def prefix(self, save_id: str) -> str:
        """Return the prefix of the names of the save's files."""

    def create(self, save_id: str, name: str) -> NewFile:
        """Create a file of the save, on any rank.

        Args:
            save_id: Identifier that :meth:`begin` was given for the save.
            name: Name of the file, including :meth:`prefix`.

        Raises:
            FileNotFoundError: If this rank does not see what :meth:`begin` has created on the first rank.
        """

    def commit(self, save_id: str, manifest: bytes) -> None:
        """Put the save at the path, and return when it is durable. The first rank calls this when all files are closed.

        Args:
            save_id: Identifier that :meth:`begin` was given for the save.
            manifest: Content of the manifest, which is written as the save's last file.
        """

    def abort(self, save_id: str) -> None:
        """Remove the files of a save that failed. The first rank calls this."""

    def exists(self) -> bool:
        """Return whether there is anything at the path."""

    def is_checkpoint(self) -> bool:
        """Return whether there is a manifest at the path."""

    def open(self) -> AbstractContextManager[Reader]:
        """Return a context that yields a reader of the checkpoint's files."""

    def remove(self) -> None:
        """Remove the checkpoint atomically from the path, then remove its files."""

    def free_bytes(self) -> int | None:
        """Return the number of bytes that can still be written; None if it is not known."""

    def children(self, recurse: bool = False) -> list[str]:
        """Return the paths of the checkpoints in the folder at the path; with ``recurse``, also of those below it."""


class NewFile:
    """Write a file of a save, and compute its size and digest on the way.

    Args:
        name: Name of the file in the manifest.
        write: Function that appends all bytes of its argument to the file.
        finish: Function that makes the file durable and closes it, and closes it even if that fails.
        abandon: Function that closes the file without making it durable.
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
        """Return the number of bytes written so far."""
        return self._size

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data`` to the file."""
        self._write(data)
        self._digest.update(data)
        self._size += len(data)

    def write_all(self, data: bytes | memoryview) -> FileEntry:
        """Write ``data`` as the whole content of the file, and close it."""
        try:
            self.write(data)
        except BaseException:
            self.abandon()
            raise
        return self.close()

    def close(self) -> FileEntry:
        """Make the file durable, close it, and return its entry for the manifest."""
        self._finish()
        return FileEntry(self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file of a save that failed."""
        with suppress(OSError):
            self._abandon()
