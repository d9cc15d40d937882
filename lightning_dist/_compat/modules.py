"""Change what modules hold and what a call of them runs."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import swa_utils

__all__ = [
    "NORM",
    "ROUTE",
    "averages_grouped_by_dtype",
    "call",
    "convert",
    "is_compiled",
    "module_versions",
    "move_without_meta_tensors",
    "own_buffers",
    "own_parameters",
    "put_parameter",
    "reset_function",
    "route_calls",
    "set_module_versions",
    "use_eager_experts",
    "with_parameters",
    "without_weak_references",
]


NORM = _NormBase
"""The class of layers whose kernels change running statistics without incrementing the tensors' versions.

Replaced by: a public base class of torch's BatchNorm and InstanceNorm layers.
"""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary in which ``module`` itself, without its submodules, holds its parameters by name.

    A tensor that is no Parameter can be put into it as well.

    Replaced by: the same as for :func:`put_parameter`.
    """
    return module._parameters


def with_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy of ``module`` that holds ``tensors`` as its own parameters, and shares everything else with it.

    If it is a part of a model of Hugging Face, its experts compute with any dtype (see :func:`use_eager_experts`).

    Replaced by: ``torch.func.functional_call``, which does not let attributes of the module differ.
    """
    other = copy.copy(module)
    vars(other)["_parameters"] = dict(tensors)
    if "config" in vars(other):
        other.config = copy.copy(module.config)
    use_eager_experts(other)
    return other


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary in which ``module`` itself, without its submodules, holds its buffers by name.

    Replaced by: the same as for :func:`put_parameter`.
    """
    return module._buffers


def module_versions(state: Any) -> dict[str, dict[str, Any]] | None:
    """Return the versions of the modules, by name, that ``state_dict()`` notes for their loading code.

    Replaced by: a public attribute of state dicts.

    Args:
        state: Any object; None is returned for one that is no state dict of a module.
    """
    versions: dict[str, dict[str, Any]] | None = getattr(state, "_metadata", None)
    return versions


def set_module_versions(state: OrderedDict[str, Any], versions: dict[str, dict[str, Any]]) -> None:
    """Set what :func:`module_versions` returns for ``state``."""
    state._metadata = versions  # type: ignore[attr-defined]


def reset_function(module: nn.Module) -> Callable[[], None] | None:
    """Return the method that initializes the parameters that ``module`` itself holds; None if it has none.

    Some of torch's layers, such as ``nn.MultiheadAttention``, give it a private name. Replaced by: a public name.
    """
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def put_parameter(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Let ``module`` hold ``tensor``, which may be any tensor, as its parameter ``key``.

    Recurrent layers also keep their parameters in a list (``_flat_weights``), in which the tensor is replaced as well.

    Replaced by: a public way to swap the tensors that a module computes with, as ``functional_call`` does internally.
    """
    module._parameters[key] = tensor  # type: ignore[assignment]
    names = vars(module).get("_flat_weights_names", ())
    if key in names:
        vars(module)["_flat_weights"][names.index(key)] = tensor


@contextmanager
def without_weak_references(module: nn.Module) -> Iterator[None]:
    """Drop the weak references of a recurrent layer to its weights in this context, so that torch can swap these.

    Replaced by: ``swap_tensors`` on tensors that have weak references, or recurrent layers without them.
    """
    if not isinstance(module, nn.RNNBase):
        yield
        return
    lists = [value for value in vars(module).values() if _are_weak_references(value)]
    for references in lists:
        references.clear()
    yield
    for references in lists:
        references += [None if weight is None else weakref.ref(weight) for weight in vars(module)["_flat_weights"]]
    module.flatten_parameters()


def _are_weak_references(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, weakref.ref) for item in value)


ROUTE = "_compiled_call_impl"
"""The attribute of a module that :func:`route_calls` sets."""


def route_calls(module: nn.Module, function: Callable[..., Any]) -> None:
    """Call ``function`` instead of ``module`` and its hooks whenever ``module`` is called.

    :func:`call` still calls the module itself. ``nn.Module.compile`` uses the same attribute.

    Replaced by: a hook that can return a module's output without running the module.
    """
    setattr(module, ROUTE, function)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module itself, with its hooks, although :func:`route_calls` has routed its calls elsewhere."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called, or :func:`route_calls`.

    Replaced by: a public attribute of modules.
    """
    return module._compiled_call_impl is not None


def convert(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer of ``module`` by what ``function`` returns for it, as ``module.to`` does.

    Replaced by: a public name of the method.
    """
    module._apply(function)  # type: ignore[no-untyped-call]


def move_without_meta_tensors(root: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Make ``root.to``, ``root.cpu`` and the like skip tensors on the meta device, which have no values to move.

    Replaced by: an argument of ``nn.Module.to`` that does so.

    Args:
        root: The module whose methods are changed.
        around: Function that returns the context in which the tensors are moved.
    """

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own: Callable[..., nn.Module] = type(root)._apply
        with around():
            return own(root, lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)

    vars(root)["_apply"] = apply


@contextmanager
def averages_grouped_by_dtype(device: torch.device) -> Iterator[None]:
    """Make torch's AveragedModel, in this context, group tensors by dtype only, as if all were on ``device``.

    torch groups them in C++ by device and dtype. As tensors of other ranks are on the meta device, the groups, and with
    them the order of collectives, would differ between ranks.

    Replaced by: a grouping function that torch function modes can intercept.
    """
    own = swa_utils._group_tensors_by_device_and_dtype

    def group(lists: list[list[torch.Tensor]], with_indices: bool = False) -> dict[Any, Any]:
        groups: dict[Any, Any] = {}
        for index, first in enumerate(lists[0]):
            columns, indices = groups.setdefault((device, first.dtype), ([[] for _ in lists], []))
            for column, tensors in zip(columns, lists, strict=True):
                column.append(tensors[index])
            indices.append(index)
        return groups

    swa_utils._group_tensors_by_device_and_dtype = group  # type: ignore[assignment]
    try:
        yield
    finally:
        swa_utils._group_tensors_by_device_and_dtype = own


def use_eager_experts(module: nn.Module) -> None:
    """Let experts of Hugging Face's models compute with any dtype, which their faster kernels do not.

    Args:
        module: A module whose configuration, if it has one, belongs to a copy of a model.

    Replaced by: a public way to choose the implementation of experts of a model that exists.
    """
    config: Any = getattr(module, "config", None)
    if config is not None and hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
