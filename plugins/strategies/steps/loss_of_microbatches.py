"""Check with random outputs of the model that the mean of the microbatches' losses is the loss of the batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dist.model.randomness import unchanged_random_numbers
from lightning_dist.techniques.pipeline import Pipeline, map_leaves
from lightning_dist.tracing.step_graph import Leaf, StepGraph

__all__ = ["warn_of_other_losses"]


_ROUNDINGS = 64
"""Number of times the rounding of a format by which the loss of two microbatches may differ from the mean of both."""


def warn_of_other_losses(
    pipeline: Pipeline, trace: Callable[[Any], StepGraph], step: Callable[[Any], Any], microbatch: Any, name: str
) -> None:
    """Warn if the loss is not a mean over samples, because it then differs from the loss in one process.

    The code after the model runs on random outputs of the model: with two microbatches, and with the samples of both.
    The mean over all samples is the mean of both means. A sum, the root of a mean, and a loss that compares samples
    with each other give another number. There is no warning if the code cannot be run this way, or draws random numbers
    after the model.

    Args:
        pipeline: The pipeline, on a rank that has the last stage.
        trace: Function that traces the step on a microbatch.
        step: Function that runs the user's step on a microbatch, with nothing logged.
        microbatch: A microbatch of the training data.
        name: The name of the user's class, for the warning.
    """
    doubled = map_leaves(microbatch, _twice)
    try:
        graphs = [trace(batch) for batch in (microbatch, doubled)]
        if any(graph.end.draws for graph in graphs):
            return
        with unchanged_random_numbers(), torch.no_grad():
            leaves, wanted = (pipeline.runner.values_at_end(graph) for graph in graphs)
            first = [_random_output(leaf) for leaf in leaves]
            # Of other losses, such as a root of a mean, the mean of two that are alike is nearly that of both.
            second = [(_random_output(leaf) / 4).to(leaf.dtype) for leaf in leaves]
            pairs = [_joined(*outputs) for outputs in zip(first, second, wanted, strict=True)]

            def loss_of(place: int) -> float:
                """Return the loss of the first microbatch, of the second one, or of both."""
                graph, batch = (graphs[1], doubled) if place == 2 else (graphs[0], microbatch)
                with pipeline.runner.restoring_side_effects(graph):
                    outputs = [pair[place] for pair in pairs]
                    return _number(pipeline.runner.run_between_parts(graph, outputs, lambda: step(batch)))

            one, other, both = map(loss_of, range(3))
    except Exception:  # The loss may not accept random outputs.
        return
    coarsest = max((torch.finfo(leaf.dtype).eps for leaf in leaves if leaf.dtype.is_floating_point), default=0.0)
    is_close = partial(math.isclose, rel_tol=max(_ROUNDINGS * coarsest, 1e-9), abs_tol=1e-6)
    if not all(map(math.isfinite, (one, other, both))) or is_close(both, (one + other) / 2):
        return
    what = "is a sum over samples" if is_close(both, one + other) else "is not a mean over samples"
    warnings.warn(
        f"The loss of {name}.training_step {what}, and a pipeline takes the mean of the losses of its microbatches"
        f" ({pipeline.config.description}): that is another number than the loss of the whole batch."
        " Return a mean over samples, or use a strategy without stages.",
        stacklevel=2,
    )


def _twice(path: str, value: Any) -> Any:
    """Return ``value`` with each sample twice; scalars and values without samples are unchanged."""
    if isinstance(value, Tensor):
        return torch.cat([value, value]) if value.ndim else value
    return type(value)([*value, *value]) if isinstance(value, list | tuple) else value


def _random_output(leaf: Leaf) -> Tensor:
    """Return values between 0 and 1, which are valid as probabilities and as logits; zeros for integer dtypes."""
    if leaf.dtype.is_floating_point:
        return torch.rand(leaf.shape, dtype=leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype)


def _joined(one: Tensor, other: Tensor, leaf: Leaf) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs for the first and the second microbatch, and the one for both, which is like ``leaf``.

    Raises:
        ValueError: If the shape of ``leaf`` is neither that of ``one`` nor that with twice the samples.
    """
    if one.shape == leaf.shape:  # It has no samples.
        return one, one, one
    both = torch.cat([one, other])
    if both.shape != leaf.shape:
        raise ValueError(f"an output of shape {tuple(one.shape)} became one of {tuple(leaf.shape)}")
    return one, other, both


def _number(result: Any) -> float:
    return float(result["loss"] if isinstance(result, Mapping) else result)
