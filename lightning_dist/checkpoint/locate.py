"""Choose the storage for a path: a file system or an object store."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_dist.checkpoint.file_system import LocalStorage
from lightning_dist.checkpoint.object_store import ObjectStorage
from lightning_dist.checkpoint.storage import CheckpointStorage

__all__ = ["storage_at"]


def storage_at(path: str | os.PathLike[str]) -> CheckpointStorage:
    """Return the storage for ``path``, a local path or a URL that fsspec knows (``s3://...``, ``memory://...``)."""
    filesystem, stripped = fsspec.core.url_to_fs(os.fspath(path))
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(Path(stripped))
    return ObjectStorage(filesystem, stripped, os.fspath(path))
