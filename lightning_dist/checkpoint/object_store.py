"""Store checkpoints as objects in a store that cannot rename.

The files of each save have unique names. The manifest lists these names and replaces the old manifest by one put; a put
of one object is atomic in every store.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import fsspec
from typing_extensions import override

from lightning_dist.checkpoint.manifest import MANIFEST
from lightning_dist.checkpoint.storage import CheckpointStorage, NewFile, Reader

__all__ = ["ObjectStorage"]


class ObjectStorage(CheckpointStorage):
    """Store a checkpoint at a URL of an object store."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str, url: str) -> None:
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self._url = url

    def __str__(self) -> str:
        return self._url

    @override
    def lock(self) -> Callable[[], None]:
        return lambda: None

    @override
    def begin(self, save_id: str) -> None:
        pass

    @override
    def prefix(self, save_id: str) -> str:
        return f"{save_id}/"

    @override
    def create(self, save_id: str, name: str) -> NewFile:
        file = self._filesystem.open(f"{self._path}/{name}", "wb")
        return NewFile(name, file.write, file.close, getattr(file, "discard", file.close))

    @override
    def commit(self, save_id: str, manifest: bytes) -> None:
        try:
            self._filesystem.pipe_file(f"{self._path}/{MANIFEST}", manifest)
        except Exception:
            if not self._has(manifest):  # The put may have failed here and yet succeeded in the store.
                raise
        try:
            for path in self._filesystem.find(self._path):
                name = path.removeprefix(self._path).lstrip("/")
                if name != MANIFEST and not name.startswith(self.prefix(save_id)):
                    self._filesystem.rm_file(path)
        except Exception as error:  # The new checkpoint is complete, and leftovers of the old one do no harm.
            warnings.warn(f"What was at {self} before could not be removed: {error!r}", stacklevel=1)

    def _has(self, manifest: bytes) -> bool:
        """Return whether the store has ``manifest`` as the manifest at this URL."""
        try:
            return bytes(self._filesystem.cat_file(f"{self._path}/{MANIFEST}")) == manifest
        except Exception:
            return False

    @override
    def abort(self, save_id: str) -> None:
        try:
            if self.prefix(save_id).encode() in self._filesystem.cat_file(f"{self._path}/{MANIFEST}"):
                return  # The put of the save's manifest has failed here and yet succeeded in the store.
        except FileNotFoundError:
            pass
        with suppress(FileNotFoundError):
            self._filesystem.rm(f"{self._path}/{save_id}", recursive=True)

    @override
    def exists(self) -> bool:
        return bool(self._filesystem.exists(self._path))

    @override
    def is_checkpoint(self) -> bool:
        return bool(self._filesystem.exists(f"{self._path}/{MANIFEST}"))

    @override
    @contextmanager
    def open(self) -> Iterator[Reader]:
        yield _ObjectReader(self._filesystem, self._path)

    @override
    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._path}/{MANIFEST}")
        self._filesystem.rm(self._path, recursive=True)

    @override
    def free_bytes(self) -> int | None:
        return None

    @override
    def children(self, recurse: bool = False) -> list[str]:
        if not self._filesystem.isdir(self._path):
            return []
        if recurse:
            names = self._filesystem.find(self._path)
            found = [name.removesuffix(f"/{MANIFEST}") for name in names if name.endswith(f"/{MANIFEST}")]
        else:
            names = self._filesystem.ls(self._path, detail=False)
            found = [name for name in names if self._filesystem.exists(f"{name}/{MANIFEST}")]
        return [str(self._filesystem.unstrip_protocol(name)) for name in found]


class _ObjectReader:
    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str) -> None:
        self._filesystem = filesystem
        self._path = path

    def size(self, name: str) -> int:
        return int(self._filesystem.size(f"{self._path}/{name}"))

    def read_into(self, name: str, start: int, *buffers: memoryview) -> int:
        data = memoryview(self._filesystem.cat_file(f"{self._path}/{name}", start, start + sum(map(len, buffers))))
        done = 0
        for buffer in buffers:
            content = data[done : done + len(buffer)]
            buffer[: len(content)] = content
            done += len(content)
        return done
