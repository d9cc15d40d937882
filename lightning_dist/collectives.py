"""Collectives faster than the backend's, in the form that FSDP2 takes them; and one of bytes, however many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist._compat import AllGather, ReduceScatter

__all__ = ["BytesBroadcast", "DirectAllGather", "TwoShotReduceScatter", "gather"]


class DirectAllGather(AllGather):
    """All-gather in which each rank sends its chunk to every other, all at once.

    As many bytes as gloo's own, which passes chunks around a ring, in one round instead of ``n - 1``.

    Args:
        before: Called with the group before each call, to check what the other ranks are about to do.
    """

    def __init__(self, before: Callable[[dist.ProcessGroup], None] | None = None) -> None:
        self._before = before

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather all ranks' ``input_tensor``, of ``numel`` elements, in ``output_tensor``, of ``n * numel``.

        Args:
            output_tensor: Chunk by rank.
            input_tensor: This rank's chunk; may be its part of ``output_tensor``.
            group: The ranks.
            async_op: Return at once, and let the backend gather.
        """
        if self._before is not None:
            self._before(group)
        if async_op:
            work: dist.Work = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=True)
            return work
        direct_all_gather(output_tensor.view(group.size(), -1), input_tensor, group)
        return None


def direct_all_gather(chunks: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send ``mine`` to all other ranks, and receive theirs into the rows of ``chunks``; a function for stack traces."""
    rank, world_size = group.rank(), group.size()
    others = [(rank + distance) % world_size for distance in range(1, world_size)]
    transfers = [dist.irecv(chunks[other], group=group, group_src=other) for other in reversed(others)]
    transfers += [dist.isend(mine, group=group, group_dst=other) for other in others]
    if chunks[rank].data_ptr() != mine.data_ptr():
        chunks[rank].copy_(mine)
    for transfer in transfers:
        assert transfer is not None
        transfer.wait()


class TwoShotReduceScatter(ReduceScatter):
    """Reduce-scatter as an all-to-all of the chunks and a local sum.

    gloo's own reduce-scatter sends as many bytes as an all-reduce, ``2 (n-1)/n`` of the buffer; this one sends
    ``(n-1)/n`` of it, in one round. Each rank sums the ranks' chunks in rank order, so the result is the same on every
    run. It costs one more buffer of the input's size while it runs.

    Args:
        before: Called with the group before each call, to check what the other ranks are about to do.
    """

    def __init__(self, before: Callable[[dist.ProcessGroup], None] | None = None) -> None:
        self._before = before

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor``, of ``n * numel`` elements, to this rank's ``numel`` in ``output_tensor``.

        Raises:
            NotImplementedError: If ``op`` is neither SUM nor AVG, or ``async_op`` is set: FSDP2 asks for neither.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"TwoShotReduceScatter sums or averages, and blocks; got {op=}, {async_op=}.")
        if self._before is not None:
            self._before(group)
        world_size = group.size()
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(world_size, -1), dim=0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(world_size)
        return None


class BytesBroadcast:
    """Gives a rank's bytes to all of a group: in one message, if none before were more.

    ``dist.broadcast_object_list`` takes two, the first for the size.

    Args:
        group: Who.
        source: Whose bytes; its rank in ``group``.
        device: What tensors the group's backend sends.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group = group
        self._source = source
        self._device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self._room = 1024

    def __call__(self, content: bytes = b"") -> bytes:
        """The source's ``content``; that of others is nothing. A collective."""
        if dist.get_rank(self._group) != self._source:
            content = b""
        message = self._sent((len(content).to_bytes(_HEADER, "little") + content)[: self._room], self._room)
        size = int.from_bytes(message[:_HEADER], "little")
        missing = _HEADER + size - self._room
        if missing > 0:
            message += self._sent(content[-missing:], missing)
            self._room = 2 * (_HEADER + size)
        return message[_HEADER : _HEADER + size]

    def _sent(self, content: bytes, size: int) -> bytes:
        """The source's ``content``, followed by what makes it ``size`` bytes."""
        buffer = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8).to(self._device)
        dist.broadcast(buffer, group=self._group, group_src=self._source)
        return buffer.cpu().numpy().tobytes()


_HEADER = 8
"""Bytes that say how many follow."""


def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Stack the tensors of all ranks along a new first dimension. A collective, and one more in the backward.

    The gradient of a rank's tensor is the sum of what all ranks' losses say of it.
    ``torch.distributed.nn.functional.all_gather`` does the same, but not over a part of the ranks on gloo.

    Args:
        tensor: This rank's; of the same shape and dtype on all ranks.
        group: The ranks; None: all processes.
    """
    stacked: torch.Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
    return stacked


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        mine = tensor.contiguous()
        stacked = mine.new_empty((dist.get_world_size(group), *mine.shape))
        dist.all_gather(list(stacked.unbind()), mine, group)
        return stacked

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed[dist.get_rank(ctx.group)], None
