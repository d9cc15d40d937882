"""Read, move and call the hooks of tensors, modules and optimizers, which torch keeps in private dictionaries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dist._compat.trees import tree_map

__all__ = [
    "GRADIENT_HANDLING",
    "ForeignHooks",
    "call_forward_hooks",
    "call_gradient_hooks",
    "call_post_accumulate_hooks",
    "defining_module",
    "foreign_hooks",
    "give_post_accumulate_hooks",
    "gradient_hooks",
    "has_foreign_hooks",
    "hooks_around_forward",
    "leave_out_hooks",
    "move_hooks",
    "move_post_accumulate_hook_last",
    "num_forward_hooks",
    "prepend_step_post_hook",
    "remove_foreign_hooks",
    "share_hooks",
    "step_hooks",
    "take_post_accumulate_hooks",
]


GRADIENT_HANDLING = frozenset({"__deepcopy__", "__reduce_ex__", "_apply", "zero_grad"})
"""Names of functions of torch that clear gradients, or copy or convert a parameter together with its gradient.

Replaced by: a way to know that a gradient is read by torch, and not by the user.
"""


def gradient_hooks(tensor: torch.Tensor) -> Mapping[int, Any]:
    """Return the tensor hooks of ``tensor`` by their keys.

    Replaced by: the same as for :func:`move_hooks`.
    """
    return tensor._backward_hooks or {}


def num_forward_hooks(module: nn.Module) -> int:
    """Return the number of forward hooks and forward pre-hooks of ``module``.

    Replaced by: a public way to list a module's hooks.
    """
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def hooks_around_forward(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries in which ``module`` holds the hooks before and after its forward, and their options.

    Replaced by: the same as for :func:`num_forward_hooks`.
    """
    held = vars(module)
    return [held[name] for name in _AROUND_FORWARD]


_AROUND_FORWARD = tuple(name for name in vars(nn.Module()) if "forward" in name and "hooks" in name)


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the dictionaries with the hooks of ``module`` that see its inputs, its outputs or their gradients."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _is_of_user(hook: Any) -> bool:
    return not defining_module(hook).startswith(_NOT_OF_USERS)


def foreign_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward and backward hooks of ``module`` that neither torch nor this package has registered.

    Replaced by: the same as for :func:`num_forward_hooks`.
    """
    return [hook for hooks in _hooks_of(module) for hook in hooks.values() if _is_of_user(hook)]


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return whether ``module`` has hooks that :func:`foreign_hooks` returns."""
    return any(_is_of_user(hook) for hooks in _hooks_of(module) for hook in hooks.values())


def remove_foreign_hooks(module: nn.Module) -> None:
    """Remove from ``module`` the hooks that :func:`has_foreign_hooks` looks for."""
    for hooks in _hooks_of(module):
        for key in [key for key, hook in hooks.items() if _is_of_user(hook)]:
            del hooks[key]


class ForeignHooks:
    """Find forward and backward hooks of users and libraries on modules, also those that are registered later.

    Replaced by: the same as for :func:`num_forward_hooks`.

    Args:
        modules: The modules, by the names that errors shall use.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._hooks = [hooks for module in modules.values() for hooks in _hooks_of(module)]
        self._num_checked = -1

    def find(self) -> str:
        """Return the name of a module with such a hook; empty: there is none. It looks closer if the number changed."""
        number = sum(map(len, self._hooks))
        if number == self._num_checked:
            return ""
        found = next((name for name, module in self._modules.items() if has_foreign_hooks(module)), None)
        if found is None:
            self._num_checked = number
        return found or ""


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let both tensors share one dictionary with the hooks of both, so that hooks added or removed later affect both.

    If ``source`` has no hooks, nothing is changed.
    """
    if source._backward_hooks and target._backward_hooks is not source._backward_hooks:
        if target._backward_hooks:
            source._backward_hooks.update(target._backward_hooks)
        target._backward_hooks = source._backward_hooks


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give ``target`` the tensor hooks and post-accumulate-grad hooks of ``source``. Their handles stay valid.

    Replaced by: a public way to list a tensor's hooks.
    """
    share_hooks(source, target)
    hooks = getattr(source, "_post_accumulate_grad_hooks", None)
    if hooks:
        target._post_accumulate_grad_hooks = hooks


def call_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Call the post-accumulate-grad hooks of ``param``, for a gradient that autograd has not set itself."""
    hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for key in list(hooks):
        if key in hooks:  # A hook may remove other hooks.
            hooks[key](param)


def take_post_accumulate_hooks(param: torch.Tensor, but: int | None) -> dict[int, Any]:
    """Remove the post-accumulate-grad hooks of ``param``, and return them by their keys.

    Replaced by: the same as for :func:`move_hooks`.

    Args:
        param: The parameter whose hooks are removed.
        but: Key of the one hook that is kept; None: all hooks are removed.
    """
    hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    if len(hooks) <= (but is not None):
        return {}
    return {key: hooks.pop(key) for key in [*hooks] if key != but}


def give_post_accumulate_hooks(param: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Give ``param`` back the hooks that :func:`take_post_accumulate_hooks` removed."""
    assert param._post_accumulate_grad_hooks is not None
    param._post_accumulate_grad_hooks.update(hooks)


def move_post_accumulate_hook_last(param: torch.Tensor, key: int) -> None:
    """Let the post-accumulate-grad hook of ``param`` with this key run after all others.

    Replaced by: an argument of ``register_post_accumulate_grad_hook`` that says so.
    """
    hooks: OrderedDict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or OrderedDict()
    if key in hooks and next(reversed(hooks)) != key:
        hooks.move_to_end(key)


def call_gradient_hooks(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Call the tensor hooks of ``param`` on a gradient that autograd has not computed itself.

    Replaced by: the same as for :func:`move_hooks`.

    Returns:
        The gradient that the last hook returned.
    """
    for hook in list(gradient_hooks(param).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


_OURS = ("torch.distributed", "lightning_dist")

_NOT_OF_USERS = ("torch.", "lightning_dist", "transformers.")
"""Packages whose hooks on modules change weights only, or keep outputs that the model returns."""


def leave_out_hooks(module: nn.Module) -> None:
    """Remove from ``module`` the hooks that torch.distributed and this package have registered.

    The dictionaries of hooks are replaced by new ones, so that the caller can put the old ones back later.
    """
    for key in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        hooks = vars(module)[key].items()
        vars(module)[key] = OrderedDict(
            (number, hook) for number, hook in hooks if not defining_module(hook).startswith(_OURS)
        )


def defining_module(hook: Any) -> str:
    """Return the name of the Python module that a function such as a hook is defined in; empty if it has none."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def call_forward_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Call the forward hooks that users and libraries have put on ``module``, for their side effects only.

    The rank on which the module ran has already applied them to ``output``, so they are given a copy here, and the
    result of the last one is ignored. The hooks of torch.distributed and of this package are not called.

    Replaced by: the same as for :func:`route_calls`.
    """
    hooks = [(key, hook) for key, hook in module._forward_hooks.items() if not defining_module(hook).startswith(_OURS)]
    if hooks:
        output = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
    for key, hook in hooks:
        with_kwargs = key in module._forward_hooks_with_kwargs
        result = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if result is None else result


def prepend_step_post_hook(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]) -> RemovableHandle:
    """Register a step post-hook that runs before those that are registered already.

    Replaced by: an argument ``prepend`` of ``Optimizer.register_step_post_hook``.
    """
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after the steps of ``optimizer``, also those of all optimizers.

    Replaced by: a public way to list them.
    """
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return [hook for hooks in (*own, *of_all) for hook in hooks.values()]
