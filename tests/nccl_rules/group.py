"""Define a process group that sends data over gloo under the rules of NCCL."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from tests.nccl_rules.log import Entry, Log, call_site, thread_name
from tests.nccl_rules.memory import bytes_of, device, raw
from tests.nccl_rules.operations import Item, Operation, run_items, timeout_s
from tests.nccl_rules.rules import Kind, RuleError, check_tensors, kind_of

__all__ = ["NAME", "OrderedGroup"]

NAME = "nccl_rules"
_WIDTH = 320
"""Number of bytes in which ranks compare what they have begun."""

_PATIENCE_S = 3.0
"""Time in seconds that an operation may take after another rank has left, since it may have exchanged its data."""


def options(given: Any, kind: type[Any]) -> Any:
    """Return the options of an operation; torch passes options, a reduction or None."""
    if isinstance(given, (dist.ReduceOp, Kind)):
        made = kind()
        made.reduceOp = given
        return made
    return kind() if given is None else given


def described(tensors: Sequence[Tensor]) -> str:
    """Return sizes and dtypes of tensors."""
    return ",".join(f"{tensor.numel()}x{str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors on the host, in one dimension."""
    with raw():
        return [bytes_of(t).clone().view(t.dtype) if t.numel() else torch.empty(0, dtype=t.dtype) for t in tensors]


class OrderedGroup(dist.ProcessGroup):
    """Run collectives in the order in which they were begun, and compare what the ranks have begun.

    Args:
        store: Store of the group.
        rank: This rank in the group.
        size: Number of ranks of the group.
        timeout: Timeout of gloo's operations.
        name: Name of the group.
        ranks: Global ranks of the group; empty: all.
    """

    bound_device_id = None

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]
    ) -> None:
        super().__init__(rank, size)
        self._own, self._size, self._store = rank, size, store
        self.global_ranks = list(ranks) or list(range(size))
        self._gloo = ProcessGroupGloo(dist.PrefixStore("data", store), rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        self._register_backend(torch.device(device().type), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._log = Log(int(os.environ.get("RANK", "0")))
        self._name = name
        self._num_begun = 0
        self._threads: set[str] = set()
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        threading.Thread(target=run_items, args=(self._items,), name="nccl rules", daemon=True).start()
        weakref.finalize(self, _leave, self._items, self._log, name)

    def getBackendName(self) -> str:  # noqa: N802 - torch calls it.
        """Return the name under which the backend is registered."""
        return NAME

    def get_group_store(self) -> dist.Store:
        """Return the store of the group."""
        return self._store

    def __deepcopy__(self, memo: Any) -> OrderedGroup:
        return self

    def shutdown(self) -> None:
        """Leave the group."""
        _leave(self._items, self._log, self._name)

    def abort(self) -> None:
        """Leave the group."""
        self.shutdown()

    # The order

    def begin(
        self,
        what: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Callable[[], list[Tensor]],
        is_compared: bool = True,
    ) -> Operation:
        """Begin an operation.

        Args:
            what: The operation with everything in which the ranks must agree.
            inputs: Tensors whose values were copied to be sent.
            outputs: Tensors that receive the results.
            run: Function that runs the operation on the group's thread, and returns the bytes of each output.
            is_compared: Whether all ranks must begin the same operation, and not only the two that exchange a message.

        Raises:
            RuleError: If another thread has begun operations of this group, so that their order is not defined.
        """
        self._num_begun += 1
        thread, site = thread_name(), call_site()
        self._threads.add(thread)
        if len(self._threads) > 1:
            raise RuleError(f"the threads {sorted(self._threads)} begin operations of one group: {what} at {site}")
        number = f"#{self._num_begun} {what}"
        self._log.add(Entry(self._name, ",".join(map(str, self.global_ranks)), thread, number, site))

        def compared() -> list[Tensor]:
            if is_compared and self._size > 1:
                self._compare(number, site)
            return run()

        item = Item(f"{number} of {self._name} ({self.group_desc}) at {site}", compared)
        operation = Operation(self._name, item, inputs, outputs, self._late)
        self._items.put(item)
        return operation

    def _compare(self, what: str, site: str) -> None:
        half = _WIDTH // 2
        text = what.encode()[:half].ljust(half, b"\0") + site.encode()[-half:].ljust(half, b"\0")
        every = self.gathered(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        texts = [bytes(other.numpy()) for other in every]
        if any(other[:half] != texts[0][:half] for other in texts):
            lines = "; ".join(
                f"rank {rank}: {other.replace(bytes(1), b' ').decode(errors='replace').split()}"
                for rank, other in zip(self.global_ranks, texts, strict=True)
            )
            raise RuleError(f"the ranks of {self.global_ranks} have begun different operations: {lines}")

    def _late(self, item: Item, waited_s: float) -> BaseException | None:
        """Return the error of an operation that has not ended; None: it may still end."""
        left = self._log.have_left(self.global_ranks, self._name) if waited_s > _PATIENCE_S else []
        if not left and waited_s < timeout_s():
            return None
        why = f", as the ranks {left} have left" if left else ""
        return RuleError(f"{item.what} does not end{why}. Begun last: {self._log.latest(self.global_ranks)}")

    # Collectives on the host

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one dimension. This runs on the group's thread."""
        flat = bytes_of(own)
        if self._size == 1 or not flat.numel():
            return [own.clone() for _ in range(self._size)]
        every = [torch.empty_like(flat) for _ in range(self._size)]
        self._gloo.allgather([every], [flat]).wait(timedelta(seconds=timeout_s()))
        return [other.view(own.dtype) for other in every]

    def exchanged(self, own: Tensor, received: Tensor, takes: list[int], sends: list[int]) -> Tensor:
        """Send parts of the bytes ``own`` to all ranks, and return theirs. This runs on the group's thread."""
        if self._size == 1:
            return own.clone()
        self._gloo.alltoall_base(received, own, takes, sends, c10d.AllToAllOptions()).wait(
            timedelta(seconds=timeout_s())
        )
        return received

    def reduced(self, values: Sequence[Tensor], kind: Kind) -> Tensor:
        """Return the reduction of the values of all ranks."""
        total = values[0].clone()
        if total.dtype == torch.bool:
            join = torch.logical_or if kind in (Kind.SUM, Kind.MAX) else torch.logical_and
            for value in values[1:]:
                total = join(total, value)
            return total
        join = {Kind.PRODUCT: torch.mul, Kind.MIN: torch.minimum, Kind.MAX: torch.maximum}.get(kind, torch.add)
        for value in values[1:]:
            total = join(total, value)
        if kind == Kind.AVG:
            total = total.div_(self._size, rounding_mode=None if total.is_floating_point() else "trunc")
        return total

    # The interface of torch.distributed, in which ``opts`` may be missing

    def allreduce(self, tensors: list[Tensor], opts: Any = None, *args: Any) -> Operation:
        """Begin an all-reduce."""
        return self._all_reduce("allreduce", tensors, options(opts, c10d.AllreduceOptions))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        """Begin an all-reduce of several tensors."""
        return self._all_reduce("allreduce_coalesced", tensors, options(opts, c10d.AllreduceCoalescedOptions))

    def _all_reduce(self, what: str, tensors: list[Tensor], opts: Any) -> Operation:
        check_tensors(tensors, is_reduced=True)
        kind = kind_of(opts.reduceOp, tensors[0])
        owns = _scaled(copies(tensors), kind, opts.reduceOp)

        def run() -> list[Tensor]:
            return [bytes_of(self.reduced(self.gathered(own), kind)) for own in owns]

        return self.begin(f"{what} {described(tensors)} {kind.name}", [], tensors, run)

    def reduce(self, tensors: list[Tensor], opts: Any = None, *args: Any) -> Operation:
        """Begin a reduction whose result one rank gets; the outputs of the others are not defined."""
        check_tensors(tensors, is_reduced=True)
        (tensor,), opts = tensors, options(opts, c10d.ReduceOptions)
        kind, root = kind_of(opts.reduceOp, tensor), opts.rootRank
        (own,) = _scaled(copies(tensors), kind, opts.reduceOp)

        def run() -> list[Tensor]:
            total = self.reduced(self.gathered(own), kind)
            return [bytes_of(total if self._own == root else own)]

        return self.begin(f"reduce {described(tensors)} {kind.name} root={root}", [], tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Operation:
        """Begin a broadcast."""
        opts = options(opts, c10d.BroadcastOptions)
        check_tensors(tensors)
        (own,) = copies(tensors)
        return self.begin(
            f"broadcast {described(tensors)} root={opts.rootRank}",
            [],
            tensors,
            lambda: [bytes_of(self.gathered(own)[opts.rootRank])],
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Operation:
        """Begin an all-gather into one tensor."""
        return self._all_gather_single("all_gather_single", [output], [input])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        """Begin all-gathers of several tensors, each into one tensor."""
        return self._all_gather_single("all_gather_coalesced", outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(self, what: str, outputs: list[Tensor], inputs: list[Tensor]) -> Operation:
        check_tensors([*outputs, *inputs])
        for output, input in zip(outputs, inputs, strict=True):
            if output.dtype != input.dtype:
                raise TypeError("output tensor must have the same type as input tensor")
            if output.numel() != input.numel() * self._size:
                raise ValueError("output tensor size must be equal to world_size times input tensor size")
        owns = copies(inputs)

        def run() -> list[Tensor]:
            return [bytes_of(torch.cat(self.gathered(own))) for own in owns]

        return self.begin(f"{what} {described(inputs)}", inputs, outputs, run)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Operation:
        """Begin an all-gather into a list of tensors."""
        (chunks,), (input,) = outputs, inputs
        check_tensors([input, *chunks])
        if any(chunk.numel() != input.numel() for chunk in chunks):
            raise RuleError("an all_gather of unequal sizes, which torch sends by a broadcast for each rank with NCCL")
        (own,) = copies(inputs)
        return self.begin(
            f"allgather {described(inputs)}", inputs, chunks, lambda: [bytes_of(each) for each in self.gathered(own)]
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Operation:
        """Begin a reduce-scatter of one tensor."""
        return self._reduce_scatter("reduce_scatter_single", [output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Operation:
        """Begin reduce-scatters of several tensors."""
        return self._reduce_scatter("reduce_scatter_coalesced", outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Operation:
        """Begin a reduce-scatter of a list of tensors."""
        with raw():
            joined = torch.cat([tensor.detach().reshape(-1) for tensor in inputs[0]])
        return self._reduce_scatter("reduce_scatter", outputs, [joined], opts)

    def _reduce_scatter(self, what: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Operation:
        opts = options(opts, c10d.ReduceScatterOptions)
        check_tensors([*outputs, *inputs], is_reduced=True)
        for output, input in zip(outputs, inputs, strict=True):
            if output.dtype != input.dtype:
                raise TypeError("input tensor must be the same type as the output tensor.")
            if input.numel() != output.numel() * self._size:
                raise ValueError("input tensor must be the same size as output size times world size")
        kind = kind_of(opts.reduceOp, inputs[0])
        owns = _scaled(copies(inputs), kind, opts.reduceOp)

        def run() -> list[Tensor]:
            results = []
            for own in owns:
                if not own.numel():
                    results.append(bytes_of(own))
                    continue
                sent = bytes_of(own)
                received = self.exchanged(sent, torch.empty_like(sent), [], [])
                parts = received.view(own.dtype).view(self._size, -1).unbind()
                results.append(bytes_of(self.reduced(parts, kind)))
            return results

        return self.begin(f"{what} {described(inputs)} {kind.name}", inputs, outputs, run)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Operation:
        """Begin an all-to-all of one tensor, in equal parts if no splits are given."""
        check_tensors([output, input])
        if output.dtype != input.dtype:
            raise TypeError("tensors must have the same type")
        sends, takes = self._num_bytes(input, list(input_splits)), self._num_bytes(output, list(output_splits))
        with raw():
            own = bytes_of(input).clone()
        room = output.numel() * output.element_size()

        def run() -> list[Tensor]:
            told = self.gathered(torch.tensor(sends))
            sent = [int(row[self._own]) for row in told]
            if sent != takes:
                rank = self.global_ranks[self._own]
                raise RuleError(f"all_to_all_single: rank {rank} expects {takes} bytes, and is sent {sent}")
            return [self.exchanged(own, torch.empty(room, dtype=torch.uint8), takes, sends)]

        dtype = str(input.dtype).removeprefix("torch.")
        return self.begin(f"all_to_all_single {dtype}", [input], [output], run)

    alltoall_base = all_to_all_single

    def _num_bytes(self, tensor: Tensor, splits: list[int]) -> list[int]:
        """Return the number of bytes of the part of each rank."""
        num_bytes = tensor.numel() * tensor.element_size()
        if not splits:
            if tensor.dim() == 0 or tensor.size(0) % self._size:
                raise ValueError("Tensor's dim 0 does not divide equally across group size")
            return [num_bytes // self._size] * self._size
        if len(splits) != self._size or sum(splits) != tensor.size(0):
            raise ValueError("Split sizes doesn't match total dim 0 size")
        return [split * (num_bytes // max(tensor.size(0), 1)) for split in splits]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation:
        """Begin an all-to-all of lists of tensors."""
        check_tensors([*outputs, *inputs])
        with raw():
            owns = [bytes_of(input).clone() for input in inputs]
        takes = [output.numel() * output.element_size() for output in outputs]

        def run() -> list[Tensor]:
            room = torch.empty(sum(takes), dtype=torch.uint8)
            received = self.exchanged(torch.cat(owns), room, takes, [len(own) for own in owns])
            return list(torch.split(received, takes))

        return self.begin("alltoall", inputs, outputs, run)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Operation:
        """Begin a gather to one rank."""
        opts = options(opts, c10d.GatherOptions)
        chunks = outputs[0] if outputs else []
        check_tensors([*inputs, *chunks])
        (own,) = copies(inputs)

        def run() -> list[Tensor]:
            every = self.gathered(own)
            return [bytes_of(each) for each in every] if self._own == opts.rootRank else []

        return self.begin(f"gather {described(inputs)} root={opts.rootRank}", inputs, chunks, run)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Operation:
        """Begin a scatter from one rank."""
        opts = options(opts, c10d.ScatterOptions)
        (output,), chunks = outputs, inputs[0] if inputs else []
        check_tensors([output, *chunks])
        own = torch.cat(copies(chunks)) if chunks else torch.empty(self._size * output.numel(), dtype=output.dtype)

        def run() -> list[Tensor]:
            return [bytes_of(self.gathered(own)[opts.rootRank].view(self._size, -1)[self._own])]

        return self.begin(f"scatter {described(outputs)} root={opts.rootRank}", chunks, outputs, run)

    def barrier(self, opts: Any = None, *args: Any) -> Operation:
        """Begin a barrier."""
        return self.begin("barrier", [], [], list)


def _scaled(tensors: list[Tensor], kind: Kind, op: Any) -> list[Tensor]:
    """Multiply the tensors by the factor of a reduction that has one."""
    return [tensor * op.__getstate__()[1] for tensor in tensors] if kind == Kind.PREMUL_SUM else tensors


def _leave(items: queue.SimpleQueue[Item | None], log: Log, name: str) -> None:
    items.put(None)
    log.leave(name)
