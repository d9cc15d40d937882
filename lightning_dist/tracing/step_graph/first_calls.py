"""Trace a step that runs its own backwards, to find the order in which it first calls the parts of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.tracing.step_graph.control_flow import run_all_branches
from lightning_dist.tracing.step_graph.errors import TraceError
from lightning_dist.tracing.step_graph.graph import InnerCall, PartCall, StepGraph
from lightning_dist.tracing.step_graph.marks import Marks
from lightning_dist.tracing.step_graph.observer import GraphObserver

__all__ = ["trace_first_calls"]


def trace_first_calls(
    root: nn.Module, step: Callable[..., Any], device: torch.device, parts: list[str], blocks: Mapping[str, nn.Module]
) -> StepGraph:
    """Trace one step on fake tensors, and return a graph with the first call of each part on any of its branches.

    The step may call parts several times and run several backwards.

    Args:
        root: The user's module, on any device; it is unchanged afterwards.
        step: Function that runs the step, as for :func:`~lightning_dist.tracing.step_graph.trace.trace_step`.
        device: Device that the fake tensors pretend to be on.
        parts: Full names of the parts.
        blocks: The parts that are repeated blocks, by full name.

    Raises:
        TraceError: If the step does not run on fake tensors, or uses tensors that only one stage would have.
    """
    make = partial(_CallsObserver, root, frozenset(parts), blocks)
    found: dict[str, PartCall] = {}
    end = PartCall("the end of the step")
    for branch in run_all_branches(make, root, step, device):
        for call in branch.observer.calls:
            found.setdefault(call.name, call)
        end.cost = max(end.cost, branch.observer.cost_of_end)
    return StepGraph(list(found.values()), end, changes_batch=False)


class _CallsObserver(GraphObserver):
    """Observe a step that runs its own backwards, of whose code between parts every stage runs all."""

    @property
    def calls(self) -> list[PartCall]:
        """Return the calls of parts, in order."""
        return self._calls

    @property
    def cost_of_end(self) -> float:
        """Return the estimated time of the code between parts, in floating-point operations."""
        return self._end.cost

    def check_function(self, function: Any) -> None:
        """Allow the step to run backwards itself."""

    def _marks_of(self, tensor: Tensor) -> Marks:
        return Marks()  # Every stage runs all the code between parts, so nothing depends on what is computed from what.

    def _take_from_part(self, tensor: Tensor, call: PartCall, inner: InnerCall, leaf: int) -> None:
        raise TraceError(
            f"A tensor that {inner.name} makes inside {call.name} is used outside of it, and {call.name} does not"
            " return it: with manual optimization only the stage of this part would have it. Let the part return it."
        )
