"""Let a process group send tensors of the CPU over gloo, beside those of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

__all__ = ["with_gloo"]

_SAME = ("allreduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "reduce", "alltoall")
"""Collectives that the gloo backend has under the same name."""

_SINGLE = {
    "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",
}
"""Collectives of one tensor, with their names in the gloo backend."""

_COALESCED = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""Collectives of several tensors, with the names of those of one tensor in the gloo backend."""

_OPTIONS = {
    "_allgather_base": _distributed_c10d.AllgatherOptions,
    "_reduce_scatter_base": _distributed_c10d.ReduceScatterOptions,
    "alltoall_base": _distributed_c10d.AllToAllOptions,
}


@cache
def with_gloo(group: type[Any]) -> type[Any]:
    """Return a subclass of a group of the device, as of the backend ``"cpu:gloo,simulated:nccl_rules"``."""
    functions: dict[str, Any] = {}
    for name in _SAME:
        functions[name] = _choosing(getattr(group, name), lambda gloo, *args, name=name: getattr(gloo, name)(*args))
    for name, inner in _SINGLE.items():
        functions[name] = _choosing(getattr(group, name), _call_single(inner))
    for name, inner in _COALESCED.items():
        functions[name] = _choosing(getattr(group, name), _call_each(inner))
    return type(f"{group.__name__}WithGloo", (group,), functions)


def _choosing(on_device: Callable[..., Any], on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(on_device)
    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors([*args, *kwargs.values()]))
        if tensors and all(tensor.device.type == "cpu" for tensor in tensors):
            return on_cpu(self._gloo, *args, *kwargs.values())
        return on_device(self, *args, **kwargs)

    return collective


def _call_single(inner: str) -> Callable[..., Any]:
    def call(gloo: Any, *args: Any) -> Any:
        given = [arg for arg in args if arg is not None]
        is_complete = type(given[-1]).__name__.endswith("Options")
        return getattr(gloo, inner)(*given, *([] if is_complete else [_OPTIONS[inner]()]))

    return call


def _call_each(inner: str) -> Callable[..., Any]:
    def call(gloo: Any, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        options = _OPTIONS[inner]()
        if hasattr(opts, "reduceOp"):
            options.reduceOp = opts.reduceOp
        works = [getattr(gloo, inner)(*pair, options) for pair in zip(outputs, inputs, strict=True)]
        return _Works(works)

    return call


class _Works(dist.Work):
    """Represent several works as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
