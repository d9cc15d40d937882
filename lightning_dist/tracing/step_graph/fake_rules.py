"""Replace torch's rules for fake tensors where torch fails, or returns symbolic sizes that code cannot compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dist import _compat

__all__ = ["FakeRules"]


class FakeRules(_compat.DispatchMode):  # type: ignore[no-untyped-call]
    """Compute the results of some operations on fake tensors by rules that replace torch's own.

    Args:
        makes_up_sizes: Whether a result whose size depends on values (``nonzero``, ``x[mask]``) gets the greatest size
            that it can have, and a number that C++ code reads from a tensor is made up. Otherwise both are symbolic.
    """

    def __init__(self, makes_up_sizes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules: Mapping[Any, Callable[..., Any]] = _RULES | _SIZED if makes_up_sizes else _RULES

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operation by the rule of this class if it has one, and otherwise by torch's."""
        rule = self._rules.get(func)
        result = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if torch.Tag.pointwise in func.tags and "is not the expected dtype" in str(error):
                return _pointwise(*args)
            raise


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    # torch's rule demands bfloat16 and strides of 16 bytes, which the kernels for float32 and for the CPU do not need.
    if a.ndim == 2 and b.ndim == 2:
        assert offs is not None
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    else:
        shape = (*(a.shape[:-1] if b.ndim == 3 else a.shape[1:2]), b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _pointwise(a: Any, b: Any, *others: Any) -> Tensor:
    # If the default dtype is float64, torch's rules refuse a float32 together with an integer tensor (torch 2.13).
    shapes = [x.shape for x in (a, b) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    maker = a if isinstance(a, Tensor) else b
    return maker.new_empty(shape, dtype=torch.result_type(a, b))


def _nonzero(x: Tensor) -> Tensor:
    return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    return x.new_empty((shape.numel(),))


def _index(x: Tensor, indices: Any) -> Any:
    if all(index is None or index.dtype not in _MASKS for index in indices):
        return NotImplemented
    return torch.ops.aten.index.Tensor(x, _as_places(indices))


def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    if all(index is None or index.dtype not in _MASKS for index in indices):
        return NotImplemented
    return x.clone()


def _index_put_(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    return NotImplemented if _index_put(x, indices, values) is NotImplemented else x.add_(0)


def _as_places(indices: Any) -> list[Tensor | None]:
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            places.append(index)
        else:
            places += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.ndim)]
    return places


def _local_scalar(x: Tensor) -> Any:
    # C++ code reads a number by this operation, for example from a 0-dimensional tensor that is used as an index.
    return 1.0 if x.is_floating_point() else 0


_MASKS = (torch.bool, torch.uint8)
_RULES: dict[Any, Callable[..., Any]] = {_compat.GROUPED_MM: _grouped_mm}
_SIZED: dict[Any, Callable[..., Any]] = {
    _compat.READ_NUMBER: _local_scalar,
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.masked_select.default: _masked_select,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten.index_put.default: _index_put,
    torch.ops.aten.index_put_.default: _index_put_,
}
