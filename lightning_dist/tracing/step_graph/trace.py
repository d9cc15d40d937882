"""Trace a step on fake tensors, to find which tensors the parts of a model pass to each other.

This happens before the model is split into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_dist.tracing.step_graph.control_flow import run_all_branches
from lightning_dist.tracing.step_graph.graph import StepGraph
from lightning_dist.tracing.step_graph.observer import GraphObserver

__all__ = ["trace_step"]


def trace_step(
    root: nn.Module,
    step: Callable[..., Any],
    device: torch.device,
    parts: list[str],
    blocks: Mapping[str, nn.Module],
    has_loss: bool = True,
    is_first_pass_only: bool = False,
) -> StepGraph:
    """Trace one step on fake tensors, and return its graph.

    Args:
        root: The user's module, on any device; it is unchanged afterwards.
        step: Function that runs the step. It is given a function that returns a fake tensor for a tensor of the batch,
            and, as ``on_log``, a function to call with the arguments of ``self.log``.
        device: Device that the fake tensors pretend to be on.
        parts: Full names of the parts, from :func:`~lightning_dist.tracing.step_graph.parts.find_parts`.
        blocks: The parts that are repeated blocks, by full name.
        has_loss: Whether the step must return a loss that depends on the model's output.
        is_first_pass_only: Whether the step is run only until it calls a block for the second time.

    Raises:
        TraceError: If the step does not run on fake tensors, or cannot be split into stages.
    """

    def make() -> GraphObserver:
        return GraphObserver(root, frozenset(parts), blocks, is_first_pass_only)

    first, *others = run_all_branches(make, root, step, device)
    graph: StepGraph = first.observer.graph(has_loss)
    for other in others:
        if other.observer.has_loss:  # A step that returns no loss on this branch is refused when it takes it.
            first.observer.check_same_loss(other.observer, other.by_number)
            graph = graph.merged_with(other.observer.graph(has_loss))
    return graph
