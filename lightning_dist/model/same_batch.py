"""Check that all ranks of a tensor-parallel group are given the same batch, because their results are combined."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from lightning_dist._compat import backend_of, simulated_backend
from lightning_dist.mesh.deferred_read import DeferredRead

__all__ = ["DifferentBatchError", "SameBatch", "digest", "hash_of_elements"]


class DifferentBatchError(RuntimeError):
    """Report that ranks of one tensor-parallel group were given different batches."""


_MAX_PENDING = 8
"""Number of comparisons that may be under way before the host waits for the first of them."""


class SameBatch:
    """Compare batches between ranks in the background, and raise on all ranks at a later batch if they differ.

    Args:
        group: Process group of the ranks of ``tp``.
        device: Device of the tensors that the ranks exchange; under Gloo, the CPU is used instead.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = torch.device("cpu") if backend_of(group) == "gloo" else device
        self._begun: tuple[dist.Work, torch.Tensor, str] | None = None
        self._read: deque[tuple[DeferredRead, str]] = deque()

    def check(self, batch: Any, what: str) -> None:
        """Begin to compare ``batch`` over the group, and look at the comparisons that have ended.

        This is a collective over the group. On an accelerator, the host does not wait for the device.

        Args:
            batch: Tensors, NumPy arrays, strings and numbers, in nested mappings, lists, tuples and other objects.
            what: Description of the batch for the error text, such as ``"the batch of a training_step"``.

        Raises:
            DifferentBatchError: If the batch of an earlier call differed between the ranks. This is the previous call
                if the ranks exchange tensors of the CPU.
        """
        if simulated_backend() is not None:  # There is no other rank, and the batch may have no values.
            return
        self._begin_to_read()
        while self._read and (self._read[0][0].is_ready or len(self._read) >= _MAX_PENDING):
            self._judge(*self._read.popleft())
        number = digest(batch).to(self._device, non_blocking=True)
        extremes = torch.stack((number, ~number))  # The MAX of ~number is ~ of the smallest digest.
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None
        self._begun = work, extremes, what

    def finish(self) -> None:
        """Wait for all comparisons.

        Raises:
            DifferentBatchError: If the batch of an earlier :meth:`check` differed between the ranks.
        """
        self._begin_to_read()
        while self._read:
            self._judge(*self._read.popleft())

    def _begin_to_read(self) -> None:
        if self._begun is not None:
            (work, extremes, what), self._begun = self._begun, None
            work.wait()
            self._read.append((DeferredRead(extremes), what))

    def _judge(self, read: DeferredRead, what: str) -> None:
        greatest, complement = read.result().tolist()
        if greatest != ~complement:
            self._read.clear()
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
            raise DifferentBatchError(
                f"The ranks {ranks} split layers between them, and were given different data as {what}. Shard the data"
                " by trainer.distributed_sampler_kwargs['rank'], not by the global rank, and use that number as well"
                " to seed what is random in the data."
            )


def _leaves(value: Any) -> Iterator[torch.Tensor | bytes]:
    """Yield the tensors in ``value``, and the bytes of its NumPy arrays, strings and numbers.

    Strings and numbers that are attributes of objects are left out, because each rank may have its own, such as a time.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, np.ndarray | np.generic):
        yield str((value.shape, value.dtype)).encode()
        if value.dtype.hasobject:
            for item in value.flat:
                yield from _leaves(item)
        else:
            yield value.tobytes()
    elif isinstance(value, str | bytes | bool | int | float | complex):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            if isinstance(item := getattr(value, entry.name), torch.Tensor | np.ndarray | Mapping | list | tuple):
                yield from _leaves(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in vars(value).values():
            if isinstance(item, torch.Tensor | np.ndarray):
                yield from _leaves(item)


def digest(batch: Any) -> torch.Tensor:
    """Hash the tensors' shapes, dtypes and bytes into one int64, on their device and without synchronizing with it."""
    on_host = xxhash.xxh3_64()
    on_device = []
    for tensor in _leaves(batch):
        if isinstance(tensor, bytes):
            on_host.update(tensor)
            continue
        on_host.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        if tensor.device.type == "cpu":
            content = tensor.detach().contiguous().view(-1).view(torch.uint8)
            on_host.update(memoryview(content.numpy()))  # type: ignore[arg-type]  # NumPy's stub knows no buffers
        else:
            on_device.append(hash_of_elements(tensor.detach()))
    number = torch.tensor(on_host.intdigest() - 2**63)
    for index, part in enumerate(on_device):
        number = number.to(part.device, non_blocking=True) + part * (2 * index + 1)
    return number


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = -0x61C8864680B583EB  # This is 2**64 / golden ratio as an odd int64, from Knuth's multiplicative hashing.


def hash_of_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Hash the elements of ``tensor`` and their order into a 0-dimensional int64 on its device.

    The hash is the sum modulo 2**64 of each element's bits times a weight that depends on the position.
    (``torch.hash_tensor`` is a XOR of the elements, which does not depend on their order.)
    """
    elements = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = elements.contiguous().view(-1).view(_BITS[elements.element_size()]).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=tensor.device) * _GOLDEN
    # The weights are mixed further, because with equally spaced weights some swaps of elements would cancel out.
    weights = (places ^ (places >> 29)) * _GOLDEN | 1
    return (bits * weights).sum()
