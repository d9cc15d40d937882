"""Count what a simulated rank computes and sends, so that its time can be predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist._compat import is_in_backward, tree_leaves
from lightning_dist.run.telemetry.flops import flops_formula

__all__ = ["Message", "Operation", "Shape", "Work", "WorkMeter"]


class Shape(NamedTuple):
    """Describe a tensor that goes into an operation."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Operation(NamedTuple):
    """Describe an operation on tensors.

    Args:
        name: Name of the operation in torch, such as ``"aten.mm.default"``.
        arguments: Its arguments and keyword arguments, with a :class:`Shape` for each tensor and tuples for lists;
            None: one of them is an object that cannot be described.
        flops: Floating-point operations of products, convolutions and attention.
        num_bytes: Bytes of all tensors that it reads and writes.
        dtype: Dtype of its largest tensor.
    """

    name: str
    arguments: tuple[Any, ...] | None
    flops: int
    num_bytes: int
    dtype: torch.dtype


class Message(NamedTuple):
    """Describe a collective, or a message between two ranks.

    Args:
        operation: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"`` or
            ``"point_to_point"``.
        num_bytes: Bytes of its larger buffer, the input or the output.
        group: Name of the process group.
    """

    operation: str
    num_bytes: int
    group: str


@dataclass
class Work:
    """Hold what a rank does, and how often.

    Args:
        operations: Operations on tensors, without views.
        messages: What it sends and receives.
        groups: Global ranks of each process group that a message names.
        num_dispatches: Number of operations that the host starts, also of views.
        model_flops: Floating-point operations without those that compute activations again.
    """

    operations: Counter[Operation] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_dispatches: int = 0
    model_flops: int = 0


class WorkMeter:
    """Count the operations that it is shown, while :attr:`work` is set."""

    def __init__(self) -> None:
        self.work: Work | None = None
        """Where operations are counted; None: they are not."""

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operation.

        Args:
            func: The operation of torch that has run.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: What it has returned.
        """
        work = self.work
        if work is None:
            return
        work.num_dispatches += 1
        if func.namespace == "c10d":
            kind = _KINDS.get(func.overloadpacket.__name__.strip("_"))
            if kind is not None:
                work.messages[kind.message(args, work.groups)] += 1
        elif not func.is_view and func.namespace not in _NOT_COMPUTED:
            operation = _operation(func, args, kwargs, result)
            work.operations[operation] += 1
            if not (is_in_backward() and torch.is_grad_enabled()):  # Checkpointing computes activations again.
                work.model_flops += operation.flops


_NOT_COMPUTED = ("prim", "profiler")
"""Namespaces of operations that compute nothing."""


def _operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operation:
    tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
    formula = flops_formula(func.overloadpacket)
    try:
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    except Exception:  # A formula may not cover all forms of its operation.
        flops = 0
    largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    # A tensor that is written in place is an argument and the result, and is read and written.
    num_bytes = sum(_accessed(tensor) for tensor in tensors)
    dtype = torch.get_default_dtype() if largest is None else largest.dtype
    try:
        described = tuple(map(_described, args)), tuple((name, _described(value)) for name, value in kwargs.items())
    except TypeError:
        return Operation(str(func), None, flops, num_bytes, dtype)
    return Operation(str(func), described, flops, num_bytes, dtype)


def _accessed(tensor: Tensor) -> int:
    """Return the bytes that are read or written of a tensor, of which an expanded one has fewer than elements."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"{type(value).__name__} cannot be described")


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class _Kind(NamedTuple):
    """Say how a message is read from the arguments of an operation of torch's process groups.

    Args:
        operation: As in :class:`Message`.
        num_buffers: Number of arguments that are buffers, after which the group follows.
    """

    operation: str
    num_buffers: int

    def message(self, args: Sequence[Any], groups: dict[str, tuple[int, ...]]) -> Message:
        """Return what a call sends, and add its group to ``groups``."""
        group = dist.ProcessGroup.unbox(args[self.num_buffers])
        name = str(group.group_name)
        if name not in groups:
            groups[name] = tuple(dist.get_process_group_ranks(group))
        return Message(self.operation, max(map(_bytes, args[: self.num_buffers])), name)


_KINDS = {
    "allreduce": _Kind("all_reduce", 1),
    "allreduce_coalesced": _Kind("all_reduce", 1),
    "broadcast": _Kind("broadcast", 1),
    "allgather": _Kind("all_gather", 2),
    "allgather_base": _Kind("all_gather", 2),
    "allgather_into_tensor_coalesced": _Kind("all_gather", 2),
    "reduce_scatter_base": _Kind("reduce_scatter", 2),
    "reduce_scatter_tensor_coalesced": _Kind("reduce_scatter", 2),
    "alltoall_base": _Kind("all_to_all", 2),
    "alltoall": _Kind("all_to_all", 2),
    "send": _Kind("point_to_point", 1),
}
"""What is counted, by the name of an operation without underscores at its ends. To receive is part of a rank's send."""
