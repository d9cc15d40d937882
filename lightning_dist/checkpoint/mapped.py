"""Hold tensors in a temporary file that is mapped into memory, so that they need disk space instead of memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["MappedTensors"]

_REGION = 256 * 2**20
"""Bytes that are mapped at once for several tensors, because the number of mappings of a process is limited."""

_ALIGNMENT = 64


class MappedTensors:
    """Make tensors in a temporary file, which is removed at the end of the context or of the process.

    The kernel writes them to the disk when memory becomes scarce. They must not be used after the end of the context.

    Args:
        folder: Existing folder of the temporary file, on a disk that has space for all tensors.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".tensors-")  # noqa: SIM115 - see __exit__
        self._region = memoryview(b"")
        self._begin = self._size = 0

    def __enter__(self) -> MappedTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()  # The mappings end with their last tensors.

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros, contiguous, on the CPU, with a storage of its own.

        Raises:
            OSError: If the disk has no space for it.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._begin + num_bytes > len(self._region):
            self._map(max(num_bytes, _REGION))
        flat = torch.frombuffer(self._region, dtype=torch.uint8, count=num_bytes, offset=self._begin)
        self._begin += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return flat.view(dtype).view(tuple(shape))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor``."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def _map(self, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        # Without space on the disk, a write to the mapping would end the process by a signal.
        os.posix_fallocate(self._file.fileno(), self._size, num_bytes)
        self._region = memoryview(mmap.mmap(self._file.fileno(), num_bytes, offset=self._size))
        self._size += num_bytes
        self._begin = 0
