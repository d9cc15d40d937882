"""Encode the manifest of a checkpoint: its files, with size and digest, and the location of every tensor in them.

``manifest.json`` has two lines: JSON, and the digest of that JSON. It is written last, so that a directory without a
manifest is not a checkpoint. Digests are XXH3-128: they detect accidental damage and are as fast as the disk, but do
not protect against deliberate changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Chunk",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "new_digest",
]

MANIFEST = "manifest.json"
_FORMAT = "lightning-dist checkpoint"
_VERSION = 1


class CheckpointError(RuntimeError):
    """Report a checkpoint that is missing, damaged, of another kind, not written, or that lacks requested data."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Report that there is nothing at a path; also a FileNotFoundError, which Lightning raises for missing files."""


def new_digest() -> Any:
    """Return a new hash object with the interface of ``hashlib``."""
    return xxhash.xxh3_128()


@dataclass(frozen=True)
class FileEntry:
    """Describe a file of a checkpoint.

    Args:
        size: Size of the file in bytes.
        digest: Digest of the content, in hexadecimal.
    """

    size: int
    digest: str


@dataclass(frozen=True)
class Chunk:
    """Describe a rectangular block of a tensor's elements, stored contiguously and in C order in one file.

    Args:
        file: Name of the file, a key of :attr:`Manifest.files`.
        start: Position of the first byte in the file.
        offsets: First index of the block in the tensor, per dimension.
        sizes: Number of elements of the block, per dimension.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Describe a tensor of a checkpoint.

    Args:
        shape: Shape of the whole tensor.
        dtype: torch's name of the dtype, such as ``"float32"``.
        chunks: Blocks that together cover the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype as torch's object.

        Raises:
            CheckpointError: If this version of torch does not have it.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"a tensor has dtype {self.dtype}, which torch {torch.__version__} does not know")
        return dtype

    def num_bytes(self, chunk: Chunk) -> int:
        """Return the number of bytes that ``chunk`` takes in its file."""
        return math.prod(chunk.sizes) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Hold the content of ``manifest.json``.

    Args:
        files: Entries of all files except the manifest, by file name.
        tensors: Entries of all tensors, by path in the checkpoint's dictionary, joined by ``/``.
        world_size: Number of ranks that wrote the checkpoint.
        saved_at: Time of the save, in seconds since the epoch.
        about: Values to show where checkpoints are listed; plain JSON.
    """

    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    world_size: int
    saved_at: float
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all files together."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """Return the bytes of ``manifest.json``."""
        content = json.dumps({"format": _FORMAT, "version": _VERSION, **vars(self)}, default=vars).encode()
        return content + b"\n" + _digest_of(content)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Parse the bytes of ``manifest.json``, as the inverse of :meth:`encode`.

        Raises:
            CheckpointError: If ``data`` is damaged, or of another format or version. The text is a clause that follows
                "The checkpoint ... cannot be read:".
        """
        content, _, digest = data.partition(b"\n")
        is_whole = digest == _digest_of(content)
        try:
            fields = json.loads(content)
            format_, version = fields.pop("format"), fields.pop("version")
        except (ValueError, AttributeError, KeyError):
            format_ = version = None
        if is_whole and format_ != _FORMAT:
            raise CheckpointError(f"its {MANIFEST} is not that of a lightning-dist checkpoint")
        if not is_whole:
            raise CheckpointError(f"its {MANIFEST} is damaged: its digest does not match its content")
        if version != _VERSION:
            raise CheckpointError(f"it has format version {version}; this lightning-dist reads version {_VERSION}")
        if any(name.startswith("/") or ".." in name.split("/") for name in fields["files"]):
            raise CheckpointError("it names files outside of itself")
        return cls(
            files={name: FileEntry(**entry) for name, entry in fields["files"].items()},
            tensors={
                key: TensorEntry(
                    tuple(entry["shape"]),
                    entry["dtype"],
                    tuple(
                        Chunk(chunk["file"], chunk["start"], tuple(chunk["offsets"]), tuple(chunk["sizes"]))
                        for chunk in entry["chunks"]
                    ),
                )
                for key, entry in fields["tensors"].items()
            },
            world_size=fields["world_size"],
            saved_at=fields["saved_at"],
            about=fields["about"],
        )


def _digest_of(content: bytes) -> bytes:
    digest = new_digest()
    digest.update(content)
    text: str = digest.hexdigest()
    return text.encode()
