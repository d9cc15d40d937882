"""Implement faster all-gather and reduce-scatter for FSDP2, a broadcast of bytes, and a differentiable gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_dist._compat import backend_of, new_group_of

__all__ = [
    "DirectAllGather",
    "FlaggedBroadcast",
    "Transfer",
    "TwoShotReduceScatter",
    "any_of_flags",
    "begin_any_of_flags",
    "begin_are_same_numbers",
    "begin_exchange",
    "direct_all_gather",
    "exchange",
    "gather",
    "group_on_host",
]


class Transfer(dist.Work):
    """Represent messages between ranks that may still be under way.

    Args:
        finish: Function that waits for the messages, and does with them what has to be done; it is called once.
    """

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the data have arrived, and return True."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


BeginExchange = Callable[[torch.Tensor, Sequence[torch.Tensor], dist.ProcessGroup], Transfer]
"""A function with the first three arguments of :func:`begin_exchange`, and its effect."""


def exchange(received: torch.Tensor, sent: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int = 0) -> None:
    """Send a tensor to every other rank and receive one from each, all at the same time.

    This is a collective over ``group``, which must be able to send messages between two ranks.

    Args:
        received: Tensor of shape ``(n, numel)`` for ``n`` ranks. Its rows receive the other ranks' tensors; this rank's
            row is left as it is.
        sent: Contiguous tensors of at most ``numel`` elements each, in the order of the ranks that receive them. On
            gloo, a shorter tensor leaves the end of the receiver's row as it is.
        group: Process group of the ``n`` ranks.
        tag: Tag of the messages. Ranks receive only messages with their own tag.
    """
    begin_exchange(received, sent, group, tag).wait()


def begin_exchange(
    received: torch.Tensor, sent: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int = 0
) -> Transfer:
    """Begin what :func:`exchange` does, and return without waiting for the messages.

    Args:
        received: As for :func:`exchange`; it must not be read or changed before the transfer has ended.
        sent: As for :func:`exchange`; they must not be changed before the transfer has ended.
        group: As for :func:`exchange`.
        tag: As for :func:`exchange`. Messages with the same tag arrive in the order in which they were sent.

    Returns:
        The transfer, for which the caller waits.
    """
    rank, world_size = group.rank(), group.size()
    others = [(rank + distance) % world_size for distance in range(1, world_size)]
    # Gloo's own thread works at once on what was begun. After a receive it often takes the core of this thread, which
    # then sends late: small exchanges on few cores took several times as long.
    sends = [dist.isend(sent[other], group=group, group_dst=other, tag=tag) for other in others]
    receives = [dist.irecv(received[other], group=group, group_src=other, tag=tag) for other in reversed(others)]

    def finish() -> None:
        for message in receives + sends:
            assert message is not None
            message.wait()

    return Transfer(finish)


class DirectAllGather:
    """All-gather by sending each rank's chunk directly to every other rank, all at the same time.

    This sends as many bytes as gloo's own all-gather, which passes chunks around a ring, but takes one round instead of
    ``n - 1``.

    Args:
        begin: Function that begins to transfer the data of each all-gather; it may check that all ranks do the same.
    """

    def __init__(self, begin: BeginExchange = begin_exchange) -> None:
        self._begin = begin

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor of shape ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Begin to gather the ``input_tensor`` of all ranks into ``output_tensor``. This is a collective.

        FSDP2 waits for the returned work before it reads ``output_tensor``, whether it has set ``async_op`` or not.

        Args:
            output_tensor: Tensor of ``n * numel`` elements that receives the chunks in rank order.
            input_tensor: This rank's chunk, of ``numel`` elements; may be a view of its part of ``output_tensor``.
            group: Process group of the ``n`` ranks.
            async_op: Whether FSDP2 gathers on the stream that computes; the data are transferred in the same way.

        Returns:
            The work to wait for.
        """
        return begin_direct_all_gather(output_tensor.view(group.size(), -1), input_tensor, group, self._begin)


def direct_all_gather(chunks: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send ``mine`` to all other ranks and receive their chunks into ``chunks``, of shape ``(n, numel)``.

    This is a collective over ``group``.

    Args:
        chunks: Tensor of ``n`` rows that receives the chunks of all ranks, including this one's.
        mine: This rank's chunk, of ``numel`` elements; may be its row of ``chunks``.
        group: Process group of the ``n`` ranks.
    """
    begin_direct_all_gather(chunks, mine, group).wait()


def begin_direct_all_gather(
    chunks: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, begin: BeginExchange = begin_exchange
) -> Transfer:
    """Begin what :func:`direct_all_gather` does, and return without waiting for the messages.

    Args:
        chunks: Tensor of ``n`` rows that receives the chunks of all ranks, including this one's.
        mine: This rank's chunk, of ``numel`` elements; may be its row of ``chunks``.
        group: Process group of the ``n`` ranks.
        begin: Function that begins to transfer the data.
    """
    own = chunks[group.rank()]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    return begin(chunks, [mine] * group.size(), group)


def begin_any_of_flags(flags: Sequence[bool], group: dist.ProcessGroup) -> Callable[[], list[bool]]:
    """Begin to find out for each flag whether it is set on any rank. This is a collective over ``group``.

    Args:
        flags: The flags of this rank, of which all ranks have the same number.
        group: Process group of the ranks, which uses gloo.

    Returns:
        A function that waits for the other ranks, and returns for each flag whether it is set on any rank.
    """
    num_words = len(flags) // 64 + 1
    packed = bytearray(np.packbits(np.array(flags, dtype=bool))).ljust(8 * num_words, b"\0")
    # Gloo reduces up to one word for each rank in its shortest rounds: this took 0.4 to 0.7 ms where messages between
    # two ranks that compute in the meantime took 1.0 to 1.7 ms.
    words = torch.frombuffer(packed, dtype=torch.int64)
    work = dist.all_reduce(words, dist.ReduceOp.BOR, group, async_op=True)
    assert work is not None

    def finish() -> list[bool]:
        work.wait()
        content = words.numpy().view(np.uint8)
        return [bool(bit) for bit in np.unpackbits(content, count=len(flags))]

    return finish


def any_of_flags(flags: Sequence[bool], group: dist.ProcessGroup) -> list[bool]:
    """Return for each flag whether it is set on any rank. This is a collective over ``group``.

    Args:
        flags: The flags of this rank, of which all ranks have the same number.
        group: Process group of the ranks, which uses gloo.
    """
    return begin_any_of_flags(flags, group)()


def group_on_host(group: dist.ProcessGroup | None, description: str) -> dist.ProcessGroup:
    """Return a process group of the same ranks whose collectives do not wait for the device.

    This is a collective over ``group``, unless its backend is gloo: then ``group`` itself is returned.

    Args:
        group: Process group of the ranks; None: all processes.
        description: Description of a new group, for logs and reports of hangs.
    """
    existing = dist.group.WORLD if group is None else group
    assert existing is not None
    if backend_of(existing) == "gloo":
        return existing
    return new_group_of(dist.get_process_group_ranks(existing), "gloo", description)


def begin_are_same_numbers(numbers: Sequence[int], group: dist.ProcessGroup) -> Callable[[], list[bool]]:
    """Begin to find out for each number whether all ranks have the same one. This is a collective over ``group``.

    Args:
        numbers: Numbers from 0 to ``2**32 - 1``.
        group: Process group of the ranks, which uses gloo.

    Returns:
        A function that waits for the other ranks, and returns for each number whether all have the same one.
    """
    mask = 2**32 - 1
    # A bit that differs between ranks is set in both halves of the combined word.
    pairs = [[number, ~number & mask] for number in numbers]
    words = torch.tensor(pairs).to(torch.uint32).view(torch.int64)
    work = dist.all_reduce(words, dist.ReduceOp.BOR, group, async_op=True)
    assert work is not None

    def finish() -> list[bool]:
        work.wait()
        return [not first & second for first, second in words.view(torch.int32).tolist()]

    return finish


class TwoShotReduceScatter:
    """Reduce-scatter by an all-to-all of the chunks and a local sum.

    gloo's own reduce-scatter sends as many bytes as an all-reduce, ``2 (n-1)/n`` of the buffer; this one sends
    ``(n-1)/n`` of it, in one round. Each rank sums the ranks' chunks in rank order, so that the result is the same in
    every run. While it runs, it needs one more buffer of the input's size.

    Args:
        begin: Function that begins to transfer the data of each reduce-scatter; it may check that all ranks do the
            same.
        defer: Function that is called with the reduce-scatter that is under way and with its output tensor. It returns
            True if its owner waits for the reduce-scatter later, before it reads the output; otherwise this object
            waits at once. None: this object always waits at once.
    """

    def __init__(
        self,
        begin: BeginExchange = begin_exchange,
        defer: Callable[[Transfer, torch.Tensor], bool] | None = None,
    ) -> None:
        self._begin = begin
        self._defer = defer

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor of shape ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` over all ranks, and put this rank's chunk into ``output_tensor``.

        This is a collective over ``group``.

        Args:
            output_tensor: Tensor of ``numel`` elements that receives this rank's chunk.
            input_tensor: Tensor of ``n * numel`` elements, one chunk per rank.
            group: Process group of the ``n`` ranks.
            op: The reduction, which must be SUM or AVG.
            async_op: Must be False.

        Raises:
            NotImplementedError: If ``op`` is neither SUM nor AVG, or if ``async_op`` is set; FSDP2 uses neither.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"TwoShotReduceScatter sums or averages, and blocks; got {op=}, {async_op=}.")
        rank, world_size = group.rank(), group.size()
        chunks = input_tensor.view(world_size, -1)
        received = torch.empty_like(chunks)
        output = output_tensor.view(-1)
        transfer = self._begin(received, chunks.unbind(), group)

        def finish() -> None:
            transfer.wait()
            if world_size == 2:  # This rank's own chunk need not be copied first.
                torch.add(received[1 - rank], chunks[rank], out=output)
            else:
                received[rank].copy_(chunks[rank])
                torch.sum(received, dim=0, out=output)
            if op == dist.ReduceOp.AVG:
                output.div_(world_size)

        reduction = Transfer(finish)
        if self._defer is None or not self._defer(reduction, output):
            reduction.wait()
        return None


class FlaggedBroadcast:
    """Broadcast one rank's bytes, and find out whether any rank has set a flag, in one all-reduce on the host.

    Bytes beyond the size of a buffer are sent by a second message. The buffer has 1024 bytes at first and grows with
    the longest content. ``dist.broadcast_object_list`` always sends two messages, the first one for the size.

    Args:
        group: Process group of the ranks, which uses gloo.
        source: Rank in ``group`` that sends its bytes.
    """

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self._group = group
        self._source = source
        self._num_words = 128

    def __call__(self, content: bytes, flag: bool) -> tuple[bytes, bool]:
        """Return the ``content`` of the source, and whether any rank has set the flag. This is a collective.

        Args:
            content: Bytes to send; ignored on ranks other than the source.
            flag: The flag of this rank.
        """
        if dist.get_rank(self._group) != self._source:
            content = b""
        room = 8 * (self._num_words - 2)
        # The other ranks' words are zero, so that the bitwise OR of all ranks' has the bytes of the source.
        begin = flag.to_bytes(8, "little") + len(content).to_bytes(8, "little") + content[:room]
        words = torch.frombuffer(bytearray(begin.ljust(8 * self._num_words, b"\0")), dtype=torch.int64)
        dist.all_reduce(words, dist.ReduceOp.BOR, self._group)
        is_set, size = words[:2].tolist()
        received = words[2:].numpy().tobytes()[:size]
        if size > room:
            rest = torch.frombuffer(bytearray(content[room:].ljust(size - room, b"\0")), dtype=torch.uint8)
            dist.broadcast(rest, group=self._group, group_src=self._source)
            received += rest.numpy().tobytes()
            self._num_words = 2 + 2 * size // 8
        return received, bool(is_set)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Stack the tensors of all ranks along a new first dimension.

    This is a collective, and so is its backward. The gradient of a rank's tensor is the sum of its gradients from the
    losses of all ranks.
    ``torch.distributed.nn.functional.all_gather`` does the same, but on gloo it does not work for a subset of the
    ranks.

    Args:
        tensor: This rank's tensor; the shape and dtype must be the same on all ranks.
        group: Process group of the ranks; None: all processes.

    Returns:
        A tensor of shape ``(n, *tensor.shape)`` for ``n`` ranks.
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
