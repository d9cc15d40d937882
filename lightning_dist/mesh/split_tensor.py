"""Represent tensors of which each rank has a part by a tensor subclass that behaves like the whole tensor.

A subclass says which functions work on a rank's part. For any other function the ranks gather the whole tensor, so that
all ranks must call it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lightning_dist._compat import BASE
from lightning_dist.mesh.consensus import timed_barrier

__all__ = ["CASTS", "RESHAPES", "TRANSPOSES", "SplitTensor", "functions_of", "whole_values"]


def functions_of(names: str) -> set[Any]:
    """Return the functions of torch and the methods of Tensor with these names, which are separated by spaces."""
    return {
        getattr(owner, name)
        for name in names.split()
        for owner in (torch, Tensor)
        if callable(getattr(owner, name, None))
    }


RESHAPES = functions_of("view reshape flatten unflatten squeeze unsqueeze")
TRANSPOSES = functions_of("transpose permute movedim swapaxes")
CASTS = functions_of("float double half bfloat16 to contiguous clone detach")
_METADATA = functions_of(
    "size dim ndimension numel __len__ is_floating_point is_complex is_contiguous element_size get_device"
)
_PROPERTIES_WITH_DATA = ("data", "grad", "T", "H", "mT", "mH", "real", "imag")


OnParts = Callable[[Any, Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Function of a torch function, a split tensor and the other arguments; it returns None if it needs all parts."""


class SplitTensor(Tensor):
    """Represent a tensor of which this rank has a part."""

    local: Tensor
    """This rank's part, a plain tensor."""

    what: ClassVar[str]
    """Description of such tensors for error texts."""

    remedy: ClassVar[str]
    """Setting that avoids such tensors, for error texts."""

    on_parts: ClassVar[Sequence[tuple[Collection[Any], OnParts]]]
    """Sets of torch functions, each with what computes their results on this rank's part."""

    @property
    def history(self) -> Tensor:
        """Return the tensor whose ``grad_fn`` and ``_base`` this tensor reports as its own."""
        return self.local

    def gathered(self) -> Tensor:
        """Gather the whole tensor on every rank. This is a collective over :attr:`ranks`."""
        raise NotImplementedError

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks that have the parts."""
        raise NotImplementedError

    def detached(self) -> Self:
        """Return the tensor without its history."""
        raise NotImplementedError

    def whole(self, function: str) -> Tensor:
        """Gather the whole tensor for ``function``, when all ranks have come to it.

        Raises:
            OtherRankError: If another rank does not call this within 60 s.
        """
        timed_barrier(f"{function} of {self.what}", 60.0, self.ranks)
        return self.gathered()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on this rank's part if that gives the same result, and otherwise on the whole tensor."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if attribute in ("grad_fn", BASE):
            return getattr(args[0].history, attribute)
        if func in _METADATA or (attribute and attribute not in _PROPERTIES_WITH_DATA):
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.__repr__ or name == "__format__":
            return repr(args[0])
        if func is Tensor.register_hook:
            return args[0].local.register_hook(*args[1:])
        if args and isinstance(args[0], cls):
            for functions, compute in cls.on_parts:
                result = compute(func, args[0], args[1:], kwargs) if func in functions else None
                if result is not None:
                    return result
        is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        out = kwargs.get("out")
        changed = (*(args[:1] if is_in_place else ()), *(out if isinstance(out, tuple) else (out,)))
        if func is Tensor.backward or any(isinstance(each, cls) for each in changed):
            raise RuntimeError(
                f"{name} of {cls.what} would change a copy that the ranks gather, not the tensor itself: compute a new"
                f" one (torch.where, masked_fill), or {cls.remedy}."
            )
        whole = {}

        def gathered(value: Any) -> Any:
            if isinstance(value, SplitTensor):
                if id(value) not in whole:
                    whole[id(value)] = value.whole(name)
                return whole[id(value)]
            if isinstance(value, Mapping):
                return {key: gathered(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(map(gathered, value)) if type(value) in (list, tuple) else value
            return value

        return func(*gathered(args), **gathered(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # In torch's stub, it is not a class method.
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Detach the part, and refuse any other operation that bypassed ``__torch_function__``."""
        if func is torch.ops.aten.detach.default:
            return args[0].detached()
        raise RuntimeError(f"{func} was called on {cls.what}, by code that torch cannot redirect: {cls.remedy}.")


def whole_values(value: Any) -> Any:
    """Gather all split tensors in ``value``, so that code may use it on one rank alone.

    This is a collective if there are any.

    Args:
        value: Any value; split tensors are found in nested mappings, lists, tuples and in fields of a dataclass.

    Returns:
        ``value`` with whole tensors; mutable mappings are changed in place.

    Raises:
        OtherRankError: If another rank has no split tensor there.
    """
    if isinstance(value, SplitTensor):
        return value.whole("the return")
    if isinstance(value, MutableMapping):
        for key, item in value.items():
            if _has_split_tensor(item):
                value[key] = whole_values(item)
        return value
    if type(value) in (list, tuple):
        return type(value)(map(whole_values, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(whole_values, value))
    if is_dataclass(value) and not isinstance(value, type):
        given = {entry.name: getattr(value, entry.name) for entry in fields(value) if entry.init}
        changed = {key: whole_values(item) for key, item in given.items() if _has_split_tensor(item)}
        return replace(value, **changed) if changed else value
    return value


def _has_split_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_split_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_split_tensor, value))
    if is_dataclass(value) and not isinstance(value, type):
        return any(_has_split_tensor(getattr(value, entry.name)) for entry in fields(value) if entry.init)
    return isinstance(value, SplitTensor)
