"""Store checkpoints on a file system, so that each appears whole or not at all.

A checkpoint is written to ``.tmp/`` in the folder of its path and moved to the path by one rename. If there is a
checkpoint at the path already, one rename exchanges the two. A process that opens the path therefore gets the old
checkpoint or the new one. Files and folders are flushed to the disk in an order that keeps this true when the power
fails (Pillai et al., All File Systems Are Not Created Equal, OSDI 2014). Where the file system cannot exchange
directories (NFS), the path is a symbolic link into ``.versions/``, which is replaced by one rename.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from typing_extensions import override

from lightning_dist.checkpoint.manifest import MANIFEST, CheckpointError
from lightning_dist.checkpoint.storage import CheckpointStorage, NewFile, Reader

__all__ = ["LocalStorage"]

TEMPORARY = ".tmp"
VERSIONS = ".versions"


class LocalStorage(CheckpointStorage):
    """Store a checkpoint at a path of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporaries = path.parent / TEMPORARY

    def __str__(self) -> str:
        return str(self.path)

    def _folder(self, save_id: str) -> Path:
        return self._temporaries / f"{self.path.name}-{save_id}"

    @override
    def lock(self) -> Callable[[], None]:
        path = self._temporaries / "lock"
        while True:
            _make_folders(self._temporaries)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(file, 1000).decode(errors="replace")
                os.close(file)
                raise CheckpointError(
                    f"another run ({owner}) saves to {self.path.parent}. Let each run save to a folder of its own"
                ) from None
            # Without locks, the leftovers of a dead run cannot be distinguished from the files of a live one, so they
            # are kept.
            except OSError:
                return partial(os.close, file)
            if _is_same(path, file):
                break
            os.close(file)  # The run that held the lock has removed its file in the meantime, so the lock is worthless.
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        for leftover in [*self._temporaries.iterdir(), *self._nameless_versions()]:
            if leftover != path:
                _remove_tree(leftover)

        def unlock() -> None:
            with suppress(OSError):
                path.unlink()
                path.parent.rmdir()
            os.close(file)

        return unlock

    def _nameless_versions(self) -> list[Path]:
        """Return the folders in ``.versions/`` that no link points to."""
        folder = self.path.parent / VERSIONS
        if not folder.is_dir():
            return []
        named = {LocalStorage(child)._version_folder() for child in self.path.parent.iterdir()}
        return [version for version in folder.iterdir() if version not in named]

    @override
    def begin(self, save_id: str) -> None:
        _make_folders(self._temporaries)
        os.mkdir(self._folder(save_id))

    @override
    def prefix(self, save_id: str) -> str:
        return ""

    @override
    def create(self, save_id: str, name: str) -> NewFile:
        file = os.open(self._folder(save_id) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        written = sent = 0

        def write(data: bytes | memoryview) -> None:
            nonlocal written, sent
            rest = memoryview(data).cast("B")
            while rest:
                count = os.write(file, rest[: 2**30])
                rest, written = rest[count:], written + count
            if written - sent >= _SEND_BYTES:
                _send_to_disk(file, sent, written - sent)
                sent = written

        def finish() -> None:
            try:
                os.fsync(file)
            finally:
                os.close(file)

        return NewFile(name, write, finish, partial(os.close, file))

    @override
    def commit(self, save_id: str, manifest: bytes) -> None:
        folder = self._folder(save_id)
        self.create(save_id, MANIFEST).write_all(manifest)
        _sync_folder(folder)
        before = self._take_place(folder) if _can_exchange(self._temporaries) else self._link_in_place(folder)
        # The new checkpoint is at the path now, so that errors from here on are warnings only.
        try:
            _sync_folder(self.path.parent)
            if before is not None and before != folder:
                os.rename(before, folder)
        except OSError as error:
            warnings.warn(f"{self} is there, but what was there before is not removed: {error}", stacklevel=1)
        else:
            _remove_tree(folder)

    def _take_place(self, folder: Path) -> Path:
        """Move ``folder`` to the path, and return the folder to which the old checkpoint, if any, was moved."""
        try:
            _rename(folder, self.path, _NOREPLACE)
        except FileExistsError:
            _rename(folder, self.path, _EXCHANGE)
        return folder

    def _link_in_place(self, folder: Path) -> Path | None:
        """Move ``folder`` to ``.versions/`` and link the path to it; return the previous target of the link, if any.

        Raises:
            CheckpointError: If there is something other than a symbolic link at the path.
        """
        if self.path.exists() and not self.path.is_symlink():
            raise CheckpointError(
                f"{self.path} cannot be replaced in one step: it is not a symbolic link, and this file system cannot"
                " exchange directories. Remove it, or save to another path."
            )
        version = self.path.parent / VERSIONS / folder.name
        _make_folders(version.parent)
        os.rename(folder, version)
        _sync_folder(version.parent)
        before = self._version_folder()
        link = folder.with_name(f"{folder.name}-link")
        os.symlink(Path(VERSIONS) / version.name, link)
        os.replace(link, self.path)
        return before

    def _version_folder(self) -> Path | None:
        """Return the target of the link at the path if this class made it, else None.

        The targets of other links do not belong to this class and must not be removed.
        """
        if not self.path.is_symlink():
            return None
        target = Path(os.readlink(self.path))
        return self.path.parent / target if target.parent == Path(VERSIONS) else None

    @override
    def abort(self, save_id: str) -> None:
        _remove_tree(self._folder(save_id))

    @override
    def exists(self) -> bool:
        return os.path.lexists(self.path)

    @override
    def is_checkpoint(self) -> bool:
        return (self.path / MANIFEST).is_file()

    @override
    @contextmanager
    def open(self) -> Iterator[Reader]:
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        reader = _LocalReader(folder)
        try:
            yield reader
        finally:
            reader.close()
            os.close(folder)

    @override
    def remove(self) -> None:
        _make_folders(self._temporaries)
        gone = self._temporaries / f"{self.path.name}-removed-{os.urandom(4).hex()}"
        target = self._version_folder()
        os.rename(self.path, gone)
        _sync_folder(self.path.parent)
        for path in (gone, target):
            if path is not None:
                _remove_tree(path)

    @override
    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._temporaries).free

    @override
    def children(self, recurse: bool = False) -> list[str]:
        found: list[str] = []
        with suppress(OSError):
            for child in self.path.iterdir():
                place = LocalStorage(child)
                if (child / MANIFEST).is_file():
                    if not child.is_symlink() or place._version_folder() is not None:
                        found.append(str(child))
                elif recurse and not child.name.startswith(".") and child.is_dir() and not child.is_symlink():
                    found += place.children(recurse)
        return found


class _LocalReader:
    """Read files through the folder's descriptor, because the path may lead to another checkpoint at any time."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._opening = threading.Lock()

    def _open(self, name: str) -> int:
        with self._opening:
            if name not in self._files:
                self._files[name] = os.open(name, os.O_RDONLY, dir_fd=self._folder)
            return self._files[name]

    def size(self, name: str) -> int:
        return os.fstat(self._open(name)).st_size

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        file, rest, done = self._open(name), list(buffers), 0
        while rest and (count := os.preadv(file, rest, start + done)):
            done += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
        return done

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


_NOREPLACE, _EXCHANGE = 1, 2  # renameat2(2)
_AT_FDCWD = -100
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None


def _rename(source: Path, target: Path, flag: int) -> None:
    """Rename ``source`` to ``target`` by renameat2(2), without replacing an existing file.

    Args:
        source: The path to rename.
        target: The new path, on the same file system.
        flag: ``_NOREPLACE`` to fail if ``target`` exists, ``_EXCHANGE`` to exchange the two.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def _can_exchange(folder: Path) -> bool:
    """Return whether the file system of ``folder`` can exchange two directories, by trying it."""
    first, second = (folder / f"exchange-{os.urandom(4).hex()}" for _ in range(2))
    os.mkdir(first)
    os.mkdir(second)
    try:
        _rename(first, second, _EXCHANGE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV):
            return False
        raise
    finally:
        os.rmdir(first)
        os.rmdir(second)
    return True


_SEND_BYTES = 8 * 2**20
_SYNC_FILE_RANGE_WRITE = 2  # sync_file_range(2)
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def _send_to_disk(file: int, start: int, size: int) -> None:
    """Start to write a range of ``file`` to the disk, so that the fsync at the end takes less time; ignore errors.

    Args:
        file: Descriptor of a file that is open for writing.
        start: Start of the range in bytes.
        size: Length of the range in bytes.
    """
    if _sync_file_range is not None:
        _sync_file_range(file, start, size, _SYNC_FILE_RANGE_WRITE)


def _is_same(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _make_folders(folder: Path) -> None:
    """Create ``folder`` and its missing parents, and make each durable in its parent."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make durable what was created in, renamed into or removed from ``folder``."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        # Network file systems that need no fsync raise these errors.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(file)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
