"""Tensors that stand in for what is on another stage, and for whatever is computed from such tensors.

A stage is handed on what the trace of the step says it needs; for the rest it has stand-ins. They are full of NaN, so
that code between the parts can run on them, and they are a class of their own: what any operation computes from a
stand-in is one, too, also where no NaN is left of it (a comparison, ``argmax``, ``nan_to_num``). So a stand-in that
reaches the loss, a log, an attribute, a part or a decision is noticed for certain, where a step has taken another path
than the one that was traced. Operations on other tensors cost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_dist import _compat
from lightning_dist.pipeline.graph import Leaf, TraceError
from lightning_dist.tensor_reads import READS, TEXTS
from lightning_dist.tracing import tensors_in

__all__ = ["StandIn", "refuse_stand_ins", "seeming_here", "stand_in"]


class StandIn(Tensor):
    """A tensor in the place of one that this stage does not have."""

    stands_for: str = "a tensor of another stage"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and let what it returns or changes be stand-ins."""
        name = getattr(func, "__name__", "")
        if name in TEXTS:
            return "<a tensor of another stage>"
        if name == "register_hook":  # a stage that has the tensor calls it
            return RemovableHandle(OrderedDict())
        leaves = tree_leaves((args, kwargs))
        stands_for = next((leaf.stands_for for leaf in leaves if type(leaf) is StandIn), cls.stands_for)
        if name in READS:
            raise TraceError(_explained(stands_for, "reads the value of"))
        with _compat.without_torch_functions():
            out = func(*args, **(kwargs or {}))
            made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
            changed = [leaf for leaf in leaves if any(leaf is tensor for tensor in made)]
            if name == "__setitem__":
                changed.append(leaves[0])
            bases = [tensor._base for tensor in changed if tensor._base is not None]
            for tensor in (*made, *changed, *bases):
                tensor.__class__ = StandIn
                tensor.stands_for = stands_for
        return out


def stand_in(leaf: Leaf, device: torch.device, stands_for: str) -> Tensor:
    """Make a stand-in.

    Args:
        leaf: What is known of the tensor.
        device: Where it pretends to be.
        stands_for: What an error calls it.
    """
    if leaf.is_changed:
        tensor = torch.full(leaf.shape, _nothing(leaf.dtype), dtype=leaf.dtype, device=device)
    else:
        tensor = _constant(leaf.dtype, device).expand(leaf.shape)
    tensor.__class__ = StandIn
    tensor.stands_for = stands_for  # type: ignore[attr-defined]  # it is a StandIn now
    return tensor


def refuse_stand_ins(value: Any, does: str) -> None:
    """Check that no tensor in ``value`` is a stand-in.

    Args:
        value: Tensors, nested in containers.
        does: What the step does with them, for the error.

    Raises:
        TraceError: If one is: the step took another path than when it was followed.
    """
    for tensor in tensors_in(value):
        if type(tensor) is StandIn:
            raise TraceError(_explained(tensor.stands_for, does))


@contextmanager
def seeming_here(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Let plain parameters and buffers of ``root`` on the meta device say, inside, that they are on ``device``."""
    seeming: dict[type[Tensor], type[Tensor]] = {nn.Parameter: _SeemingParameter, Tensor: _SeemingBuffer}
    found = [tensor for tensor in (*root.parameters(), *root.buffers()) if tensor.is_meta and type(tensor) in seeming]
    classes = [type(tensor) for tensor in found]
    for tensor, own in zip(found, classes, strict=True):
        tensor.__class__ = seeming[own]
        tensor._seems_on = device  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor, own in zip(found, classes, strict=True):
            tensor.__class__ = own


class _SeemingParameter(nn.Parameter):
    _seems_on: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._seems_on


class _SeemingBuffer(Tensor):
    _seems_on: torch.device
    __torch_function__ = nn.Parameter.__torch_function__

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._seems_on


def _explained(stands_for: str, does: str) -> str:
    return (
        f"The step {does} what it has made of {stands_for}, which is on another stage and was not handed on: when the"
        " step was followed it took another path. A pipeline follows a step again when the step's shapes, the module's"
        " attributes, current_epoch, global_step or batch_idx change; decide by one of these, and not by a global"
        " variable or a value inside a tensor."
    )


@cache
def _constant(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), _nothing(dtype), dtype=dtype, device=device)


def _nothing(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
