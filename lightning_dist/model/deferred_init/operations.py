"""Describe what has been done to deferred tensors, and do it to real ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dist._compat import simulated_backend, tree_leaves, tree_map, tree_map_only

__all__ = [
    "ALLOCATIONS",
    "NUMBERS",
    "Operation",
    "Real",
    "Record",
    "View",
    "find_record",
    "generator_of",
    "is_deferred",
    "needed",
    "operations_of",
    "record_of",
    "replay",
    "values_of",
]

_ATEN = torch.ops.aten

ALLOCATIONS = frozenset(
    {
        _ATEN.empty,
        _ATEN.empty_like,
        _ATEN.empty_permuted,
        _ATEN.empty_strided,
        _ATEN.new_empty,
        _ATEN.new_empty_strided,
    }
)
"""Operations that return uninitialised memory."""

_FILLS = frozenset({_ATEN.copy_, _ATEN.fill_, _ATEN.normal_, _ATEN.uniform_, _ATEN.zero_})
"""Operations that overwrite their first argument without reading it."""

NUMBERS = itertools.count()
"""The numbers of operations, in the order in which they are recorded."""

_RECORD = "_lightning_dist_record"
"""The attribute of a deferred tensor's storage that holds the :class:`Record`."""


def is_deferred(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on the meta device, and what gives values to it is recorded."""
    operations = operations_of([tensor])
    return bool(operations) and not any(operation.is_void for operation in operations)


def operations_of(tensors: Sequence[Tensor]) -> list[Operation]:
    """Return all operations on which the values of the deferred ones of ``tensors`` depend, in their order."""
    records = [record for tensor in tensors if (record := find_record(tensor)) is not None]
    return needed([(record, next(NUMBERS)) for record in records])


def values_of(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return real tensors on ``device`` with the values of deferred ones. No generator's state is changed.

    Args:
        tensors: Tensors for which :func:`is_deferred` is true.
        device: Device of the results.
    """
    if not tensors:
        return []
    if simulated_backend() is not None:  # Nobody reads the values.
        return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device) for t in tensors]
    operations = operations_of(tensors)
    real = replay(operations, operations[0].device)
    found = [View.of(tensor).show(real) for tensor in tensors]
    return [(own if _owns_storage(own) else own.clone()).to(device) for own in found]


@dataclass(eq=False)
class Record:
    """Hold the operations that have written into a storage, in their order."""

    num_bytes: int
    operations: list[Operation] = field(default_factory=list)


@dataclass(frozen=True)
class View:
    """Describe a meta tensor by the record of its storage, and by the part of the storage that it shows."""

    record: Record
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Describe ``tensor``, whose storage gets a record if it has none."""
        return cls(record_of(tensor), tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    @property
    def shows_all(self) -> bool:
        """Return whether the tensor shows its whole storage."""
        return self.size.numel() * self.dtype.itemsize == self.record.num_bytes

    def show(self, real: Real) -> Tensor:
        """Return the tensor on the real storage, which is allocated if there is none yet."""
        if self.record not in real.storages:
            real.storages[self.record] = torch.UntypedStorage(self.record.num_bytes, device=real.device)  # type: ignore[no-untyped-call]
        tensor = torch.empty(0, dtype=self.dtype, device=real.device)
        return tensor.set_(real.storages[self.record], self.offset, self.size, self.stride)

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.size)} {self.stride} {self.offset}"


@dataclass
class Real:
    """Hold the real storages in place of those on the meta device."""

    device: torch.device
    storages: dict[Record, torch.UntypedStorage] = field(default_factory=dict)


@dataclass(eq=False)
class Operation:
    """Describe an operation that a constructor has run on meta tensors.

    Args:
        number: Place of the operation in the order of all operations of this process.
        function: The operation, an overload of ``torch.ops``.
        args: Arguments, with views in place of meta tensors, and with copies of real tensors.
        kwargs: Keyword arguments in the same form, without a generator.
        device: Device on which the operation would have run.
        default_dtype: torch's default dtype when the operation was recorded.
        written: Records of the storages that the operation has changed.
        state: State of the generator before the operation; None if it draws no random numbers.
        results: The new tensors among the leaves of the result, and None for other leaves.
        is_void: Whether the operation reads memory that was never initialised.
    """

    number: int
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    default_dtype: torch.dtype
    written: list[Record]
    state: Tensor | None = None
    results: list[View | None] = field(default_factory=list)
    is_void: bool = False

    @property
    def constants(self) -> list[Tensor]:
        """Return the real tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def contents(self) -> list[Tensor]:
        """Return the constants and the random state, which may differ between ranks."""
        return self.constants if self.state is None else [*self.constants, self.state]

    def __str__(self) -> str:
        """Return a text with the operation and its arguments, of which tensors are shown by dtype and shape."""

        def shown(leaf: Any) -> str:
            return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else str(leaf)

        return f"{self.function}{tree_map(shown, (self.args, self.kwargs))}"

    def overwrites(self, record: Record) -> bool:
        """Return whether nothing is left of what was in the storage of ``record`` before."""
        if self.written == [record] and self.function.overloadpacket in _FILLS:
            return bool(self.args[0].shows_all)
        return record not in self.written

    def reads(self) -> list[Record]:
        """Return the records of the storages whose values the operation uses or keeps in part."""
        name = self.function.overloadpacket.__name__
        if name.startswith("new_") or name.endswith("_like"):  # They use only the shape and the dtype.
            return []
        is_fill = bool(self.written) and self.overwrites(self.written[0])
        leaves = tree_leaves((self.args[1:] if is_fill else self.args, self.kwargs))
        return [leaf.record for leaf in leaves if isinstance(leaf, View)]

    def run(self, real: Real, generator: torch.Generator | None = None) -> Any:
        """Run the operation on real storages, and return its result."""
        args, kwargs = tree_map_only(View, lambda view: view.show(real), (self.args, self.kwargs))
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            return self.function(*args, **(kwargs if generator is None else {**kwargs, "generator": generator}))
        finally:
            torch.set_default_dtype(dtype)

    def replay(self, real: Real) -> None:
        """Run the operation with the random numbers that it has drawn, and keep the storages of new tensors."""
        if self.state is not None:
            generator_of(self.device).set_state(self.state)
        for view, tensor in zip(self.results, tree_leaves(self.run(real)), strict=True):
            if view is None:
                continue
            if tensor.stride() == view.stride and tensor.untyped_storage().nbytes() == view.record.num_bytes:
                real.storages[view.record] = tensor.untyped_storage()
            else:  # Some operations choose another memory format on the meta device.
                view.show(real).copy_(tensor)


def needed(ends: list[tuple[Record, int]]) -> list[Operation]:
    """Return the operations on which storages depend, in the order in which they were recorded.

    Args:
        ends: Records of the storages, each with the number before which an operation counts.
    """
    found: dict[int, Operation] = {}
    while ends:
        record, end = ends.pop()
        for operation in reversed(record.operations):
            if operation.number >= end:
                continue
            if operation.number not in found:
                found[operation.number] = operation
                ends += [(read, operation.number) for read in operation.reads()]
            if operation.overwrites(record):
                break
    return [found[number] for number in sorted(found)]


def replay(operations: Sequence[Operation], device: torch.device) -> Real:
    """Run operations on ``device``, and return the storages that they fill. No generator's state is changed."""
    real = Real(device)
    generator = generator_of(device)
    state = generator.get_state()
    try:
        for operation in operations:
            operation.replay(real)
    finally:
        generator.set_state(state)
    return real


def find_record(tensor: Tensor) -> Record | None:
    """Return the record of a deferred tensor; None if the tensor is not deferred."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, ValueError):  # Sparse tensors and the parameters of lazy modules have no storage.
        return None
    record: Record | None = vars(storage).get(_RECORD)
    return record


def record_of(tensor: Tensor) -> Record:
    """Return the record of a deferred tensor, or begin one."""
    record = find_record(tensor)
    if record is None:
        record = Record(tensor.untyped_storage().nbytes())
        setattr(tensor.untyped_storage(), _RECORD, record)
    return record


def _owns_storage(tensor: Tensor) -> bool:
    """Return whether the storage of ``tensor`` holds nothing else."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of ``device``."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
