"""Measure the memory of all tensors that a program creates, also of those that hold no values."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_dist._compat import on_resize

__all__ = ["StorageMeter"]


class StorageMeter:
    """Add up the bytes of the storages that tensors share, and remember the largest sum.

    A storage counts from the first time that :meth:`see` is given a tensor of it until Python frees it. One that is
    first seen while :attr:`is_paused` never counts.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._ignored: set[int] = set()
        self.is_paused = False
        """Whether what is seen now is not in the memory that is measured, such as the data on a GPU's host."""
        self.current = 0
        """Bytes of all storages."""
        self.peak = 0
        """The largest value of :attr:`current` since :meth:`reset_peak`."""

    def see(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, or the change of its size."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._ignored:
            return
        if self.is_paused and key not in self._sizes:
            self._ignored.add(key)
            weakref.finalize(storage, self._ignored.discard, key)
            return
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._set(key, storage.nbytes())

    def add(self, num_bytes: int) -> None:
        """Count bytes that are in no storage here; a negative number takes them away."""
        self.current += num_bytes
        self.peak = max(self.peak, self.current)

    def reset_peak(self) -> None:
        """Let the peak be that of what follows."""
        self.peak = self.current

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Count changes of the size of storages in this context, by which FSDP2 frees gathered parameters."""

        def resized(storage: torch.UntypedStorage) -> None:
            if id(storage) in self._sizes:
                self._set(id(storage), storage.nbytes())

        with on_resize(resized):
            yield

    def _set(self, key: int, size: int) -> None:
        self.current += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.current)

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key, 0)
