"""Check with random outputs of the model that the mean of the microbatches' losses is the loss of the batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dist.model.randomness import unchanged_random_numbers
from lightning_dist.techniques.pipeline import Pipeline, map_leaves
from lightning_dist.tracing.step_graph import Leaf, StepGraph

__all__ = ["warn_of_other_losses"]


def warn_of_other_losses(
    pipeline: Pipeline, trace: Callable[[Any], StepGraph], step: Callable[[Any], Any], microbatch: Any, name: str
) -> None:
    """Warn if the loss is not a mean over samples, because it then differs from the loss in one process.

    The code after the model runs on random outputs of the model: once with a microbatch, and once with each of its
    samples twice. A mean over samples stays the same; a sum is doubled, and a loss that compares samples with each
    other changes. There is no warning if the code cannot be run this way, or draws random numbers after the model.

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
            outputs = [_random_output(leaf) for leaf in pipeline.runner.values_at_end(graphs[0])]
            with pipeline.runner.restoring_side_effects(graphs[0]):
                once = _number(pipeline.runner.run_between_parts(graphs[0], outputs, lambda: step(microbatch)))
            wanted = pipeline.runner.values_at_end(graphs[1])
            outputs = [_like(output, leaf) for output, leaf in zip(outputs, wanted, strict=True)]
            with pipeline.runner.restoring_side_effects(graphs[1]):
                twice = _number(pipeline.runner.run_between_parts(graphs[1], outputs, lambda: step(doubled)))
    except Exception:  # The loss may not accept random outputs.
        return
    if not (math.isfinite(once) and math.isfinite(twice)) or math.isclose(once, twice, rel_tol=1e-3, abs_tol=1e-6):
        return
    what = (
        "is a sum over samples" if math.isclose(twice, 2 * once, rel_tol=1e-3) else "compares samples with each other"
    )
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


def _like(output: Tensor, leaf: Leaf) -> Tensor:
    """Return ``output`` in the shape of ``leaf``, with each sample twice.

    Raises:
        ValueError: If the shape of ``leaf`` is neither that of ``output`` nor that with twice the samples.
    """
    if output.shape == leaf.shape:
        return output
    doubled = torch.cat([output, output])
    if doubled.shape != leaf.shape:
        raise ValueError(f"an output of shape {tuple(output.shape)} became one of {tuple(leaf.shape)}")
    return doubled


def _number(result: Any) -> float:
    return float(result["loss"] if isinstance(result, Mapping) else result)
