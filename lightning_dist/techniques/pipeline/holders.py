"""Record which ranks of a pipeline have the values of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["are_parts_in_use", "has_holders", "holders_of", "is_part", "mark", "mark_part", "without_holder_records"]

_holders_of = WeakTensorKeyDictionary()
"""The ranks of the pipeline that have the values of a tensor, for tensors that not all ranks have."""

_parts = WeakTensorKeyDictionary()
"""Tensors that hooks have computed from a rank's parts of tensors, so that each rank has other values, or none."""


def holders_of(tensor: Tensor) -> frozenset[int] | None:
    """Return the ranks, by their index along ``pp``, that have the values of ``tensor``; None: all, or unknown."""
    found: frozenset[int] | None = _holders_of.get(tensor)  # type: ignore[no-untyped-call]
    return found


def has_holders(leaf: Any) -> bool:
    """Return whether ``leaf`` is a tensor with recorded holders, so that some ranks may not have its values."""
    return isinstance(leaf, Tensor) and leaf in _holders_of


def mark(tensor: Tensor, holders: frozenset[int]) -> Tensor:
    """Record the ranks that have the values of ``tensor``, and return it.

    Args:
        tensor: A tensor of which other ranks have only the shape.
        holders: The indices of the ranks along ``pp``.
    """
    _holders_of[tensor] = holders
    return tensor


def mark_part(tensor: Tensor) -> Tensor:
    """Record that ``tensor`` is computed from a part of a tensor that only this rank has, or stands for it."""
    _parts[tensor] = True
    return tensor


def is_part(leaf: Any) -> bool:
    """Return whether ``leaf`` is a tensor for which :func:`mark_part` was called."""
    return isinstance(leaf, Tensor) and leaf in _parts


def are_parts_in_use() -> bool:
    """Return whether there is any tensor for which :func:`mark_part` was called."""
    return len(_parts) > 0


@contextmanager
def without_holder_records(root: nn.Module) -> Iterator[None]:
    """Forget in this context which ranks hold the tensors of ``root``, so that torch can convert the tensors.

    The record holds weak references to the tensors, and torch cannot swap a tensor that has weak references.

    Args:
        root: Module whose parameters, gradients and buffers torch is about to convert.
    """
    marks: dict[str, frozenset[int]] = {}
    for name, tensor in _tensors_of(root):
        if (holders := holders_of(tensor)) is not None:
            marks[name] = holders
            del _holders_of[tensor]
    try:
        yield
    finally:
        for name, tensor in _tensors_of(root):
            if name in marks:
                mark(tensor, marks[name])


def _tensors_of(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, their gradients, and the buffers of ``root``, with a name for each."""
    for name, param in root.named_parameters():
        yield name, param
        with torch.DisableTorchFunction():  # An active mode would ask the other stages for the gradient.
            gradient = param.grad
        if gradient is not None:
            yield f"{name}.grad", gradient
    yield from root.named_buffers()
