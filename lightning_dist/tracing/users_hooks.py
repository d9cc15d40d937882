"""Find the modules on which users and other libraries have put hooks, and undo what their hooks change in trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lightning_dist._compat import foreign_hooks, has_foreign_hooks, version_of
from lightning_dist.mesh.consensus import union_over_ranks
from lightning_dist.tracing.step_graph import Dataflow, restored, tensors_in
from lightning_dist.tracing.step_graph.reached import reached_by, reached_outside

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
    """Undo, at the end of this context, what users' hooks in ``block`` and its own methods change outside of it.

    A hook may count or keep values in a list, or in an attribute of the LightningModule whose method it is, and a block
    may append to a global list. What they reach is the object whose method a hook is, the variables that they use, and
    the modules in these: their attributes, containers and tensors, except parameters, are restored.

    Args:
        block: A module that is run on other inputs than those of the user's steps.
    """
    hooks = [hook for module in block.modules() for hook in foreign_hooks(module)]
    reached = {id(value): value for hook in hooks for value in reached_by(hook)}
    roots = [value for value in reached.values() if isinstance(value, nn.Module)]
    others = [value for value in reached.values() if not isinstance(value, nn.Module)]
    others += (value for value in reached_outside(block) if id(value) not in reached)
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
