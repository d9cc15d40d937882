"""Encode the manifest of a checkpoint: its files, with size and digest, and the location of every tensor in them.

``manifest.json`` has two lines: JSON, and the digest of that JSON. It is written last, so that a directory without a
manifest is not a checkpoint. Digests are XXH3-128: they detect accidental damage and are as fast as the disk, but do
not protect against deliberate changes.

DTensors are described by :class:`~lightning_dist.checkpoint.sections.Section`, so that the manifest does not grow with
the product of tensors and ranks. Of other tensors, and of all tensors in version 1 of the format, it lists the chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import xxhash

from lightning_dist.checkpoint.sections import Chunk, Section, SectionChunks, SectionFiles

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "CheckpointNotFoundError",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "new_digest",
]

MANIFEST = "manifest.json"
_FORMAT = "lightning-dist checkpoint"
_VERSION = 2
_READABLE = (1, 2)


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
class TensorEntry:
    """Describe a tensor of a checkpoint.

    Args:
        shape: Shape of the whole tensor.
        dtype: torch's name of the dtype, such as ``"float32"``.
        chunks: Blocks that together cover the whole tensor: a list of them, or what makes them by a rule.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...] | SectionChunks

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

    def chunks_within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Chunk]:
        """Return the chunks that may have elements in common with a block; only these are made by a rule.

        Args:
            offsets: First index of the block, per dimension.
            sizes: Number of its elements, per dimension.
        """
        return iter(self.chunks) if isinstance(self.chunks, tuple) else self.chunks.within(offsets, sizes)


@dataclass(frozen=True)
class Manifest:
    """Hold the content of ``manifest.json``.

    Args:
        files: Entries of all files except the manifest, by file name.
        listed: Entries of the tensors whose chunks are listed, by path in the checkpoint's dictionary, joined by ``/``.
        world_size: Number of ranks that wrote the checkpoint.
        saved_at: Time of the save, in seconds since the epoch.
        about: Values to show where checkpoints are listed; plain JSON.
        sections: The sections of all other tensors.
        prefix: What the names of files begin with.
    """

    files: Mapping[str, FileEntry]
    listed: Mapping[str, TensorEntry]
    world_size: int
    saved_at: float
    about: Mapping[str, Any] = field(default_factory=dict)
    sections: Sequence[Section] = ()
    prefix: str = ""

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Return the entries of all tensors, by path in the checkpoint's dictionary, joined by ``/``."""
        by_rule = SectionFiles(self.sections, self.prefix).tensors()
        entries = {name: TensorEntry(layout.shape, layout.dtype, chunks) for name, (layout, chunks) in by_rule.items()}
        return {**self.listed, **entries}

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all files together."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """Return the bytes of ``manifest.json``."""
        fields = {
            "files": self.files,
            "tensors": self.listed,
            "world_size": self.world_size,
            "saved_at": self.saved_at,
            "about": self.about,
            "sections": [section.encode() for section in self.sections],
            "prefix": self.prefix,
        }
        content = json.dumps({"format": _FORMAT, "version": _VERSION, **fields}, default=vars).encode()
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
        if version not in _READABLE:
            raise CheckpointError(f"it has format version {version}; this lightning-dist reads version 1 to {_VERSION}")
        prefix = fields.get("prefix", "")
        if any(name.startswith("/") or ".." in name.split("/") for name in (*fields["files"], prefix)):
            raise CheckpointError("it names files outside of itself")
        return cls(
            files={name: FileEntry(**entry) for name, entry in fields["files"].items()},
            listed={
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
            sections=[Section.decode(section) for section in fields.get("sections", ())],
            prefix=prefix,
        )


def _digest_of(content: bytes) -> bytes:
    digest = new_digest()
    digest.update(content)
    text: str = digest.hexdigest()
    return text.encode()
