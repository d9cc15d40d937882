"""Read and change tensors and DTensors beyond their public interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_dist._compat.operations import READ_NUMBER

__all__ = [
    "BASE",
    "GET_BASE",
    "accept_sequential_redistribution",
    "assigning_converted_parameters",
    "base_of",
    "detached",
    "local_of",
    "make_parameter",
    "num_packed",
    "on_equal",
    "on_resize",
    "on_scalar_read",
    "packed_shard",
    "replace_local",
    "shifted",
    "version_of",
    "without_memory",
]

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

BASE = "_base"
"""The name of the attribute that :func:`base_of` reads. Replaced by: the same as for it."""

GET_BASE = torch.Tensor._base.__get__  # type: ignore[union-attr]  # On the class, it is a descriptor.
"""The function that modes and tensor subclasses see when :func:`base_of` is called. Replaced by: the same as for it."""


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that ``tensor`` is a view of, and None if it is no view.

    Replaced by: a public name of the attribute.
    """
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that every change of ``tensor`` or of a view of it increases, except a change through ``.data``.

    torch's notes on autograd describe it. Replaced by: a public name of the attribute.

    Raises:
        RuntimeError: If the tensor was made in inference mode, in which there are no versions.
    """
    return tensor._version


def without_memory(cls: type[_Tensor], shape: Sequence[int], **options: Any) -> _Tensor:
    """Create a tensor of the class ``cls`` that has no memory of its own.

    torch's guide to extending torch names the function. Replaced by: a public name of it.

    Args:
        cls: A subclass of ``torch.Tensor``.
        shape: The shape that the tensor reports.
        **options: The ``strides``, ``dtype``, ``device`` and ``requires_grad`` that the tensor reports.
    """
    tensor: _Tensor = torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    return tensor


def make_parameter(tensor: torch.Tensor, is_parameter: bool) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` be ``is_parameter``, for a tensor of a subclass of ``torch.Tensor``.

    Replaced by: an ``nn.Parameter`` that can be subclassed together with other tensor classes.
    """
    tensor._is_param = is_parameter


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its graph, in an operation that a dispatch mode sees; both have the same version.

    Replaced by: a ``detach`` that shares the version there, as it does elsewhere.
    """
    # Below autograd, a view does not share the version counter of its base unless this key is enabled.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, without a node in autograd's graph.

    Replaced by: a public accessor of DTensor that does so.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def dtensor_like(local: torch.Tensor, like: torch.Tensor) -> DTensor:
    """Return a DTensor of ``local``, without a gradient of its own, which is distributed as ``like``, a DTensor.

    Unlike ``DTensor.from_local``, this does not describe the distribution anew, which costs more than the update of a
    small parameter, and does not move ``local`` to the device of the mesh. Replaced by: a public constructor that takes
    the description of another DTensor.
    """
    spec = cast(DTensor, like)._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype is not local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def replace_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of ``tensor`` by ``local``.

    Replaced by: an assignment to ``tensor.data``, which DTensor ignores today.
    """
    tensor._local_tensor = local


def packed_shard(dim: int, num_packed: int) -> Placement:
    """Return the placement that splits a tensor along ``dim`` into ``num_packed`` equal parts, and shards each of them.

    It is for the weight of a layer that packs several layers, such as those of queries, keys and values. Replaced by: a
    public placement that does so.
    """
    return _StridedShard(dim, split_factor=num_packed)


def num_packed(placement: Placement) -> int:
    """Return the ``num_packed`` of a :func:`packed_shard`; 0 for other placements."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 0


def shifted(placement: Placement) -> Placement:
    """Return the placement of a tensor that has one more dimension, in front of the others."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def on_scalar_read(function: Callable[[DTensor], int | float | bool | complex]) -> None:
    """Let ``function`` compute the number that ``item()``, ``float()``, a comparison or a format reads from a DTensor.

    For a sum or norm that is still to be reduced, torch silently returns this rank's part, and cannot format it.

    Replaced by: an ``item()`` of DTensor that reduces.
    """

    def read(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> int | float | bool | complex:
        return function(args[0])

    def format_whole(self: DTensor, specification: str) -> str:
        if self.ndim == 0 and not self.is_meta:
            return format(self.item(), specification)
        return object.__format__(self, specification)

    DTensor._op_dispatcher._custom_op_handlers[READ_NUMBER] = read
    DTensor.__format__ = format_whole  # type: ignore[method-assign, assignment]


def on_equal(function: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Let ``function`` compute ``torch.equal`` of two tensors of which at least one is a DTensor.

    torch shards the second tensor like the first, which fails if it has fewer dimensions.

    Replaced by: a ``torch.equal`` that returns False for DTensors of different shapes.
    """

    def equal(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
        return function(args[0], args[1])

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = equal


def accept_sequential_redistribution() -> None:
    """Silence torch's warning, on each rank, that a norm over two mesh axes takes two all-reduces.

    Replaced by: a public way to flatten mesh axes, which the warning asks for.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@contextmanager
def assigning_converted_parameters() -> Iterator[None]:
    """Let ``nn.Module.to`` assign the data of fake tensors in this context.

    It swaps fake parameters for converted ones, which torch refuses because fake tensors are known by weak references.
    Replaced by: fake tensors that can be converted in modules.
    """
    before = torch.utils.swap_tensors

    def assign(tensor: torch.Tensor, converted: torch.Tensor) -> None:
        tensor.data = converted.data

    torch.utils.swap_tensors = assign
    try:
        yield
    finally:
        torch.utils.swap_tensors = before


@contextmanager
def on_resize(function: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``function`` with each storage whose size was changed in this context, which no mode of torch sees.

    Replaced by: an operation for it, or an event of the memory of tensors that hold no values.
    """
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = before(storage, size)
        function(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]
