"""Keep tensors in a file on a disk, whose pages are in memory only while they are used."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lightning_dist._compat import local_of

__all__ = ["MappedFile"]


SMALLEST_BYTES = 4096
"""Size from which a tensor is kept in the file: that of a page of memory."""


class MappedFile:
    """Keep tensors in one file, which has no name and is removed from the disk when the process ends.

    Args:
        folder: Folder on a disk of this node. A folder in memory, such as one on tmpfs, would save nothing.

    Raises:
        ValueError: If no file can be created there.
    """

    is_pinned = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - It lives as long as this object.
        except OSError as error:
            raise ValueError(
                f"offload_folder={str(folder)!r}: no file can be created there ({error.strerror}). Name a folder in"
                " which this process may write."
            ) from error
        self._size = 0
        self._maps: dict[int, mmap.mmap] = {}
        """The mapped part of the file by the address of its memory."""

    def place(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor in the file with the values of ``tensor``, or a small ``tensor`` itself.

        Args:
            tensor: A tensor in the memory of the CPU, but not a DTensor.

        Raises:
            OSError: If the disk is full.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < SMALLEST_BYTES:
            return tensor
        # A write into a hole of the file would end the process by SIGBUS if the disk were full.
        try:
            os.posix_fallocate(self._file.fileno(), self._size, num_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"offload_folder={str(self._folder)!r} has no room for {num_bytes / 2**20:.0f} MiB more, after"
                f" {self._size / 2**20:.0f} MiB of this rank: {error.strerror}. Name a folder on a larger disk.",
            ) from error
        part = mmap.mmap(self._file.fileno(), num_bytes, offset=self._size)
        self._size += -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        placed = torch.frombuffer(part, dtype=tensor.dtype).view(tensor.shape)
        self._maps[placed.data_ptr()] = part
        placed.copy_(tensor.detach())
        return placed

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, or its local tensor if it is a DTensor, is in the file."""
        return local_of(tensor).untyped_storage().data_ptr() in self._maps

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Take the pages of those of ``tensors`` that are in the file out of this process's memory.

        Their values are kept: the next access reads them from the system's page cache or from the disk.
        """
        for tensor in tensors:
            part = self._maps.get(local_of(tensor).untyped_storage().data_ptr())
            if part is not None:
                part.madvise(mmap.MADV_DONTNEED)
