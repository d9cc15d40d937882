"""Find the modules on which users and other libraries have put hooks, and undo what their hooks change in trials."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from lightning_dist._compat import foreign_hooks, has_foreign_hooks, version_of
from lightning_dist.mesh.consensus import union_over_ranks
from lightning_dist.tracing.step_graph import Dataflow, restored, tensors_in

__all__ = ["hooked_inside", "hooked_modules", "unchanged_by_hooks"]


def hooked_modules(root: nn.Module, flow: Dataflow | None) -> list[str]:
    """Return the names of the modules in ``root`` that have a hook now, or had one when a step called them.

    A hook on one rank counts on all ranks, which must find the same plan: it may be there to log on rank 0. This is a
    collective over all processes.

    Args:
        root: The model, not changed yet.
        flow: The record of a step of the model; None: none was recorded.
    """
    own = {name for name, module in root.named_modules() if name and has_foreign_hooks(module)}
    return union_over_ranks(own | (set() if flow is None else flow.hooked))


def hooked_inside(name: str, hooked: list[str], itself: bool) -> str:
    """Return the first of the modules ``hooked`` that is inside of the module ``name``; empty: there is none.

    Args:
        name: Full name of a module.
        hooked: Names from :func:`hooked_modules`.
        itself: Whether the module ``name`` counts as well.
    """
    return next((key for key in hooked if key.startswith(f"{name}.") or (itself and key == name)), "")


@contextmanager
def unchanged_by_hooks(block: nn.Module) -> Iterator[None]:
    """Undo, at the end of this context, what users' hooks in ``block`` change outside of it.

    A hook may count or keep values in a list, or in an attribute of the LightningModule whose method it is. What a hook
    reaches is the object whose method it is, the variables that it uses, and the modules in these: their attributes,
    containers and tensors, except parameters, are restored.

    Args:
        block: A module that is run on other inputs than those of the user's steps.
    """
    hooks = [hook for module in block.modules() for hook in foreign_hooks(module)]
    reached = {id(value): value for hook in hooks for value in _reached(hook)}.values()
    roots = [value for value in reached if isinstance(value, nn.Module)]
    others = [value for value in reached if not isinstance(value, nn.Module)]
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    held = [value for module in modules for value in (*vars(module).values(), *module.buffers(recurse=False))]
    tensors = [tensor for tensor in tensors_in([others, held]) if not isinstance(tensor, nn.Parameter)]
    kept = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in tensors if not tensor.is_inference()]
    with ExitStack() as stack:
        for root in roots or [nn.Module()] * bool(others):
            stack.enter_context(restored(root, others))
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, version, before in kept:
                    if version_of(tensor) != version:
                        tensor.detach().copy_(before)


_DEPTH = 3
"""Number of functions, each called by the one before, whose variables are found."""


def _reached(hook: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the objects that a hook can change: its own object, and the variables that it uses."""
    if isinstance(hook, functools.partial):
        parts = [hook.func, *hook.args, *hook.keywords.values()]
    elif isinstance(hook, types.MethodType):
        parts = [hook.__self__, hook.__func__]
    elif isinstance(hook, types.FunctionType):
        parts = _variables(hook)
    elif isinstance(hook, type | types.ModuleType | types.BuiltinFunctionType):
        return
    else:
        yield hook
        return
    for part in parts if depth else ():
        yield from _reached(part, depth - 1)


def _variables(function: types.FunctionType) -> list[Any]:
    found = [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # The variable may have no value yet.
            found.append(cell.cell_contents)
    return [*found, *(function.__defaults__ or ())]
