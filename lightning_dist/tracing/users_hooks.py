"""Find the modules on which users and other libraries have put hooks."""

from __future__ import annotations

from torch import nn

from lightning_dist._compat import has_foreign_hooks
from lightning_dist.mesh.consensus import union_over_ranks
from lightning_dist.tracing.step_graph import Dataflow

__all__ = ["hooked_inside", "hooked_modules"]


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
