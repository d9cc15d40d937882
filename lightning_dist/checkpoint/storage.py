"""Where a path leads: to a file system, or to an object store."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_dist.checkpoint.file_system import LocalPlace
from lightning_dist.checkpoint.object_store import ObjectPlace
from lightning_dist.checkpoint.place import Place

__all__ = ["place_of"]


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place at ``path``: a local path, or a URL that fsspec knows (``s3://...``, ``memory://...``)."""
    filesystem, stripped = fsspec.core.url_to_fs(os.fspath(path))
    if isinstance(filesystem, LocalFileSystem):
        return LocalPlace(Path(stripped))
    return ObjectPlace(filesystem, stripped, os.fspath(path))
