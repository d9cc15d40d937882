"""Send compressed gradients between replicas, and count the bytes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist._compat import backend_of
from lightning_dist.mesh.collectives import direct_all_gather, exchange

__all__ = ["Wire"]


class Wire:
    """Run the collectives of compressors among the replicas of this rank's shard, and count the bytes that it sends.

    Args:
        group: Process group of the replicas, which nothing else uses while gradients are reduced.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # torch.distributed keeps the group. A second reference would keep its connections open after an error here.
        self._group = weakref.ref(group)
        self._is_gloo = backend_of(group) == "gloo"
        self.rank = group.rank()
        """Index of this rank among the replicas."""
        self.size = group.size()
        """The number of replicas."""
        self.num_bytes = 0
        """The number of bytes that this rank has sent to other replicas, by the algorithms' formulas."""
        self.seconds = 0.0
        """The time for which this rank has sent and received, or on an accelerator, has begun to."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group of the replicas."""
        group = self._group()
        assert group is not None
        return group

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def sum(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over the replicas. The result has the same bits on all of them.

        The ranks of a ring send ``2 (n - 1) / n`` of the tensor each.

        Args:
            tensor: A contiguous tensor of any shape and of a dtype that the backend can sum.
        """
        self.num_bytes += 2 * (self.size - 1) * tensor.numel() * tensor.itemsize // self.size
        with self._timed():
            dist.all_reduce(tensor, group=self.group)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace ``tensors`` by their exact means over the replicas, in one message for each dtype.

        Args:
            tensors: Tensors of any shapes, in the same order on all replicas.
        """
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            together = torch.cat([tensor.reshape(-1) for tensor in alike])
            self.sum(together)
            together.div_(self.size)
            for tensor, mean in zip(alike, torch.split(together, [t.numel() for t in alike]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def average_each(self, tensors: Sequence[Tensor]) -> None:
        """Replace ``tensors`` by their exact means, whose bits do not depend on what else is averaged.

        The order in which a ring adds up numbers depends on where they are in the message. Two pipeline stages that
        share a parameter average it together with different others, and must get the same mean.

        Args:
            tensors: Tensors of any shapes, in the same order on all replicas.
        """
        if self.size <= 2:  # The sum of two numbers does not depend on their order.
            self.average(tensors)
            return
        for tensor in tensors:
            self.average([tensor])

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all replicas, stacked along a new first dimension.

        Args:
            tensor: A contiguous tensor, with the same shape on all replicas.
        """
        self.num_bytes += (self.size - 1) * tensor.numel() * tensor.itemsize
        gathered = tensor.new_empty((self.size, *tensor.shape))
        with self._timed():
            if self._is_gloo and tensor.device.type == "cpu":
                direct_all_gather(gathered.view(self.size, -1), tensor.view(-1), self.group)
            else:
                dist.all_gather_into_tensor(gathered.view(-1), tensor.view(-1), self.group)
        return gathered

    def transpose(self, chunks: Tensor) -> Tensor:
        """Send row ``i`` of ``chunks`` to replica ``i``, and return the rows that all replicas sent to this one.

        Args:
            chunks: A contiguous tensor of shape ``(n, numel)`` for ``n`` replicas.
        """
        self.num_bytes += (self.size - 1) * chunks[0].numel() * chunks.itemsize
        received = torch.empty_like(chunks)
        with self._timed():
            if self._is_gloo and chunks.device.type == "cpu":
                received[self.rank].copy_(chunks[self.rank])
                exchange(received, chunks.unbind(), self.group)
            else:
                dist.all_to_all_single(received, chunks, group=self.group)
        return received
