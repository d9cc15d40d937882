"""What a checkpoint says of itself: its files, each with size and digest, and where in them every tensor is.

``manifest.json`` has two lines, JSON and the digest of that JSON. It is written last: what has no manifest is no
checkpoint. Digests are XXH3-128: they find every accident, and keep up with the disk; they are no signature.
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
    """A checkpoint that is missing, damaged, of another kind, not written, or without what is asked of it."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is nothing at the path that was asked for; also what Lightning raises where a file is missing."""


def new_digest() -> Any:
    """A hash object, as of ``hashlib``."""
    return xxhash.xxh3_128()


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Args:
        size: In bytes.
        digest: Of its content, hexadecimal.
    """

    size: int
    digest: str


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor's elements, in C order in one file.

    Args:
        file: Its name.
        start: Where in it, in bytes.
        offsets: Where in the tensor, a number a dimension.
        sizes: How large, likewise.
    """

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint.

    Args:
        shape: Its whole shape.
        dtype: torch's name of its dtype, ``"float32"``.
        chunks: ShardSlices that are the whole of it together.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"a tensor has dtype {self.dtype}, which torch {torch.__version__} does not know")
        return dtype

    def num_bytes(self, chunk: Chunk) -> int:
        """Of ``chunk``, in its file."""
        return math.prod(chunk.sizes) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    Args:
        files: Name to entry, of all files but the manifest.
        tensors: Path in the checkpoint's dictionary, joined by ``/``, to entry.
        world_size: Number of ranks that wrote it.
        saved_at: When, in seconds since the epoch.
        about: What whoever saved it wants to see in a listing; plain JSON.
    """

    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    world_size: int
    saved_at: float
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """As the bytes of ``manifest.json``."""
        content = json.dumps({"format": _FORMAT, "version": _VERSION, **vars(self)}, default=vars).encode()
        return content + b"\n" + _digest_of(content)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The inverse of :meth:`encode`.

        Raises:
            CheckpointError: If ``data`` is damaged, or of another format or version; the text is a clause about it.
        """
        content, _, digest = data.partition(b"\n")
        is_whole = digest == _digest_of(content)
        try:
            fields = json.loads(content)
            format_, version = fields.pop("format"), fields.pop("version")
        except (ValueError, AttributeError, KeyError):
            format_ = version = None
        if is_whole and format_ != _FORMAT:
            raise CheckpointError(f"its {MANIFEST} is not of a lightning-dist checkpoint")
        if not is_whole:
            raise CheckpointError(f"its {MANIFEST} is damaged: digest and content differ")
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
