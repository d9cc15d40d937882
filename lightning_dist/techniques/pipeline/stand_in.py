"""Provide stand-ins for tensors that are on another stage, and mark what is computed from them as stand-ins too.

A stage receives the tensors that it needs according to the trace of the step, and has stand-ins for all others. A
stand-in is full of NaN, so that code between the parts can run on it. It has a class of its own, and whatever an
operation computes from a stand-in is a stand-in as well, even where the result has no NaN (a comparison, ``argmax``,
``nan_to_num``). If a step takes another path than the traced one, a stand-in reaches the loss, a logged value, an
attribute, a part or a decision, and is certain to be noticed there. Operations on other tensors have no overhead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dist._compat import base_of, own_buffers, own_parameters, tree_leaves
from lightning_dist.model.tensor_state import is_remote
from lightning_dist.techniques.pipeline.remote_value import RemoteParameter
from lightning_dist.tracing.step_graph import Leaf, TraceError, tensors_in
from lightning_dist.tracing.step_graph.tensor_reads import READS, TEXTS

__all__ = ["StandIn", "refuse_stand_ins", "seeming_here", "stand_in"]


class StandIn(Tensor):
    """Replace a tensor that this stage does not have.

    Attributes:
        stands_for: The name of the tensor or of the part that returns it, for errors.
    """

    stands_for: str = "a tensor of another stage"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and turn the tensors that it returns or changes into stand-ins.

        Raises:
            TraceError: If ``func`` reads values.
        """
        name = getattr(func, "__name__", "")
        if name in TEXTS:
            return "<a tensor of another stage>"
        if name == "register_hook":  # A stage that has the tensor registers the hook.
            return RemovableHandle(OrderedDict())
        leaves = tree_leaves((args, kwargs))
        stands_for = next((leaf.stands_for for leaf in leaves if type(leaf) is StandIn), cls.stands_for)
        if name in READS:
            raise TraceError(_explained(stands_for, "reads the value of"))
        with torch.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            made = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
            changed = [leaf for leaf in leaves if any(leaf is tensor for tensor in made)]
            if name == "__setitem__":
                changed.append(leaves[0])
            bases = [base for tensor in changed if (base := base_of(tensor)) is not None]
            for tensor in (*made, *changed, *bases):
                tensor.__class__ = StandIn
                tensor.stands_for = stands_for
        return out


def stand_in(leaf: Leaf, device: torch.device, stands_for: str) -> Tensor:
    """Create a stand-in.

    Args:
        leaf: Shape and dtype of the missing tensor, and whether the step changes it in place.
        device: Device on which the stand-in is created.
        stands_for: The name of the missing tensor, or of the part that returns it, for errors.
    """
    if leaf.is_changed:
        tensor = torch.full(leaf.shape, _nothing(leaf.dtype), dtype=leaf.dtype, device=device)
    else:
        tensor = _constant(leaf.dtype, device).expand(leaf.shape)
    tensor.__class__ = StandIn
    tensor.stands_for = stands_for  # type: ignore[attr-defined]  # The tensor is a StandIn now.
    return tensor


def refuse_stand_ins(value: Any, does: str) -> None:
    """Check that no tensor in ``value`` is a stand-in.

    Args:
        value: A tensor, or tensors nested in containers.
        does: A verb phrase that says what the step does with the tensors, for the error.

    Raises:
        TraceError: If one is a stand-in, because the step took another path than the traced one.
    """
    for tensor in tensors_in(value):
        if type(tensor) is StandIn:
            raise TraceError(_explained(tensor.stands_for, does))


@contextmanager
def seeming_here(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Make plain parameters and buffers on the meta device report ``device`` as theirs in this context.

    Args:
        modules: The modules that hold the tensors; their submodules are not included.
        device: The device that the tensors report.
    """
    seeming: dict[type[Tensor], type[Tensor]] = {
        nn.Parameter: _SeemingParameter,
        RemoteParameter: _SeemingParameter,
        Tensor: _SeemingBuffer,
    }
    by_id = {
        id(tensor): tensor
        for module in modules
        for held in (own_parameters(module), own_buffers(module))
        for tensor in held.values()
        if tensor is not None and is_remote(tensor) and type(tensor) in seeming
    }
    found = list(by_id.values())
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
        f"The step {does} a tensor that depends on {stands_for}, which is on another stage and was not sent to this"
        " one, because the step took another path when it was traced. A pipeline traces a step again when the step's"
        " shapes, the module's attributes, current_epoch, global_step or batch_idx change; decide by one of these, and"
        " not by a global variable or a value inside a tensor."
    )


@cache
def _constant(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), _nothing(dtype), dtype=dtype, device=device)


def _nothing(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
