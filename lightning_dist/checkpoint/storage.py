"""Where checkpoints are kept: how one appears whole or not at all, and how it is opened and removed.

On a file system a checkpoint is written in ``.tmp/`` beside its place and takes it by one rename; what is there already
changes places with it in one exchange. So whoever opens the path gets the old checkpoint or the new one. Files and
folders are flushed to the disk in the order that keeps this true when the power fails (Pillai et al., All File Systems
Are Not Created Equal, OSDI 2014). Where a file system cannot exchange (NFS), the path is a link into ``.versions/``,
which is replaced by one rename.

An object store has no rename: there every save's files have names of their own, and the manifest, which names them,
takes the place of the old one by one put.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_dist.checkpoint.manifest import MANIFEST, CheckpointError, FileEntry, new_digest

__all__ = ["TEMPORARY", "NewFile", "Place", "Reader", "place_of"]

TEMPORARY = ".tmp"
VERSIONS = ".versions"


class Reader(Protocol):
    """The files of a checkpoint, all of the same one, also when the path gets another one in the meantime."""

    def size(self, name: str) -> int:
        """Of the file, in bytes. Raises FileNotFoundError."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Fill ``buffer`` with the file's bytes from ``start`` on; returns how many there were."""


class Place(Protocol):
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

    def open(self) -> Any:
        """A context manager that gives a :class:`Reader`."""

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
        finish: Makes what was written durable, and closes.
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

    def close(self) -> FileEntry:
        """Make the file durable, close it, and say what is in it."""
        self._finish()
        return FileEntry(self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file of a save that failed."""
        with suppress(OSError):
            self._abandon()


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place at ``path``: a local path, or a URL that fsspec knows (``s3://...``, ``memory://...``)."""
    filesystem, stripped = fsspec.core.url_to_fs(os.fspath(path))
    if isinstance(filesystem, LocalFileSystem):
        return _LocalPlace(Path(stripped))
    return _ObjectPlace(filesystem, stripped, os.fspath(path))


class _LocalPlace:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporaries = path.parent / TEMPORARY

    def __str__(self) -> str:
        return str(self.path)

    def _folder(self, save_id: str) -> Path:
        return self._temporaries / f"{self.path.name}-{save_id}"

    def lock(self) -> Callable[[], None]:
        _make_folders(self._temporaries)
        file = os.open(self._temporaries / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            raise CheckpointError(
                f"another run ({owner}) saves to {self.path.parent}. Give each run a folder of its own"
            ) from None
        except OSError:  # a file system without locks: then nothing tells a dead run's leftovers from a live one's
            return partial(os.close, file)
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        for leftover in self._temporaries.iterdir():
            if leftover.name != "lock":
                _remove_tree(leftover)
        return partial(os.close, file)

    def begin(self, save_id: str) -> None:
        _make_folders(self._temporaries)
        os.mkdir(self._folder(save_id))

    def prefix(self, save_id: str) -> str:
        return ""

    def create(self, save_id: str, name: str) -> NewFile:
        file = os.open(self._folder(save_id) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

        def write(data: bytes | memoryview) -> None:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[os.write(file, rest[: 2**30]) :]

        def finish() -> None:
            os.fsync(file)
            os.close(file)

        return NewFile(name, write, finish, partial(os.close, file))

    def commit(self, save_id: str, manifest: bytes) -> None:
        folder = self._folder(save_id)
        file = self.create(save_id, MANIFEST)
        file.write(manifest)
        file.close()
        _sync_folder(folder)
        if _can_exchange(self._temporaries):
            self._take_place(folder)
        else:
            self._link_in_place(folder)
        _sync_folder(self.path.parent)
        # What was at the path before, if anything was.
        _remove_tree(folder)

    def _take_place(self, folder: Path) -> None:
        try:
            _rename(folder, self.path, _NOREPLACE)
        except FileExistsError:
            _rename(folder, self.path, _EXCHANGE)

    def _link_in_place(self, folder: Path) -> None:
        if self.path.exists() and not self.path.is_symlink():
            raise CheckpointError(
                f"{self.path} cannot be replaced in one step: it is no link, and this file system cannot exchange"
                " directories. Remove it, or save to another path."
            )
        version = self.path.parent / VERSIONS / folder.name
        _make_folders(version.parent)
        os.rename(folder, version)
        _sync_folder(version.parent)
        before = Path(os.readlink(self.path)).name if self.path.is_symlink() else None
        link = folder.with_name(f"{folder.name}-link")
        os.symlink(Path(VERSIONS) / version.name, link)
        os.replace(link, self.path)
        if before:
            _sync_folder(self.path.parent)
            os.rename(version.with_name(before), folder)

    def abort(self, save_id: str) -> None:
        _remove_tree(self._folder(save_id))

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def is_checkpoint(self) -> bool:
        return (self.path / MANIFEST).is_file()

    @contextmanager
    def open(self) -> Iterator[Reader]:
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        reader = _LocalReader(folder)
        try:
            yield reader
        finally:
            reader.close()
            os.close(folder)

    def remove(self) -> None:
        _make_folders(self._temporaries)
        gone = self._temporaries / f"{self.path.name}-removed-{os.urandom(4).hex()}"
        target = self.path.resolve() if self.path.is_symlink() else None
        os.rename(self.path, gone)
        _sync_folder(self.path.parent)
        for path in (gone, target):
            if path is not None:
                _remove_tree(path)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._temporaries).free

    def children(self) -> list[str]:
        try:
            return [str(child) for child in self.path.iterdir() if (child / MANIFEST).is_file()]
        except OSError:
            return []


class _LocalReader:
    """Opens files by the folder's descriptor: its path may lead to another checkpoint at any time."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def _open(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(name, os.O_RDONLY, dir_fd=self._folder)
        return self._files[name]

    def size(self, name: str) -> int:
        return os.fstat(self._open(name)).st_size

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        file, done = self._open(name), 0
        while done < len(buffer) and (count := os.preadv(file, [buffer[done:]], start + done)):
            done += count
        return done

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


class _ObjectPlace:
    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str, url: str) -> None:
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self._url = url

    def __str__(self) -> str:
        return self._url

    def lock(self) -> Callable[[], None]:
        return lambda: None

    def begin(self, save_id: str) -> None:
        pass

    def prefix(self, save_id: str) -> str:
        return f"{save_id}/"

    def create(self, save_id: str, name: str) -> NewFile:
        file = self._filesystem.open(f"{self._path}/{name}", "wb")
        return NewFile(name, file.write, file.close, getattr(file, "discard", file.close))

    def commit(self, save_id: str, manifest: bytes) -> None:
        self._filesystem.pipe_file(f"{self._path}/{MANIFEST}", manifest)
        for path in self._filesystem.find(self._path):
            name = path.removeprefix(self._filesystem._strip_protocol(self._path)).lstrip("/")
            if name != MANIFEST and not name.startswith(self.prefix(save_id)):
                self._filesystem.rm_file(path)

    def abort(self, save_id: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm(f"{self._path}/{save_id}", recursive=True)

    def exists(self) -> bool:
        return bool(self._filesystem.exists(self._path))

    def is_checkpoint(self) -> bool:
        return bool(self._filesystem.exists(f"{self._path}/{MANIFEST}"))

    @contextmanager
    def open(self) -> Iterator[Reader]:
        yield _ObjectReader(self._filesystem, self._path)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._path}/{MANIFEST}")
        self._filesystem.rm(self._path, recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def children(self) -> list[str]:
        if not self._filesystem.isdir(self._path):
            return []
        return [
            str(self._filesystem.unstrip_protocol(child))
            for child in self._filesystem.ls(self._path, detail=False)
            if self._filesystem.exists(f"{child}/{MANIFEST}")
        ]


class _ObjectReader:
    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str) -> None:
        self._filesystem = filesystem
        self._path = path

    def size(self, name: str) -> int:
        return int(self._filesystem.size(f"{self._path}/{name}"))

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        data = self._filesystem.cat_file(f"{self._path}/{name}", start, start + len(buffer))
        buffer[: len(data)] = data
        return len(data)


_NOREPLACE, _EXCHANGE = 1, 2  # renameat2(2)
_AT_FDCWD = -100
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None


def _rename(source: Path, target: Path, flag: int) -> None:
    """Rename without ever replacing: fail where ``target`` exists, or exchange the two."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def _can_exchange(folder: Path) -> bool:
    """Whether the file system of ``folder`` exchanges directories; tried, since its name does not tell."""
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


def _make_folders(folder: Path) -> None:
    """Make ``folder`` and those above it; each is durable in the one above."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make what was created in, renamed into or removed from ``folder`` durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # network file systems that sync folders by themselves
            raise
    finally:
        os.close(file)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
