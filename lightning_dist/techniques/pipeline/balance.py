"""Assign the calls of a model's parts to contiguous stages, so that the slowest stage is as fast as possible."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from torch import nn

from lightning_dist.tracing.step_graph import StepGraph, TraceError

__all__ = ["balanced", "costs", "split_by_hand"]

_BACKWARD = 2
"""Cost of a backward in forwards: one matrix product for the gradient of the input, and one for that of the weight."""
_UPDATE = 30
"""Cost of updating one parameter in an optimizer step (gradient, two moments, weight), in floating-point operations."""


def costs(graph: StepGraph, root: nn.Module, share_of_update: float) -> list[float]:
    """Estimate the time of each call for one microbatch of a step, in floating-point operations.

    The time is that of the forward, the backward and the call's share of the optimizer step. The time of the code
    between parts, including the loss, is added to the last call.

    Args:
        graph: Graph of the traced step, in which each call has the cost of its forward and the parameters that it uses.
        root: The user's module with the parameters of all stages; tensors may be on the meta device.
        share_of_update: The part of an optimizer step's time that counts for a microbatch.
    """
    params = dict(root.named_parameters(remove_duplicate=False))
    modules = dict(root.named_modules())
    found = []
    for call in graph.calls:
        own = set(modules[call.name].parameters()) | {params[name] for name in call.params}
        update = _UPDATE * sum(param.numel() for param in own) * share_of_update
        found.append((1 + _BACKWARD) * call.cost + update)
    found[-1] += (1 + _BACKWARD) * graph.end.cost
    return found


def balanced(costs: Sequence[float], is_block: Sequence[bool], num_stages: int) -> list[int]:
    """Assign each call to a stage, so that each stage is a contiguous run of calls and the slowest stage costs least.

    In a model with blocks, each stage has at least one block.

    Args:
        costs: Cost of each call of a part, in the order of the calls and in any unit.
        is_block: For each call, whether it is a call of a repeated block.
        num_stages: Number of stages of the pipeline, over all ranks.

    Returns:
        The index of the stage of each call.

    Raises:
        TraceError: If there are fewer blocks (or calls, in a model without blocks) than stages.
    """
    counts = is_block if any(is_block) else [True] * len(costs)
    if sum(counts) < num_stages:
        what = "repeated blocks" if any(is_block) else "parts that can be told apart"
        raise TraceError(
            f"The pipeline has {num_stages} stages, and the model only {sum(counts)} {what}: use fewer stages"
            " (pp_size x virtual_stages), or a deeper model."
        )
    num = len(costs)
    sums, blocks = [0.0], [0]
    for cost, counted in zip(costs, counts, strict=True):
        sums.append(sums[-1] + cost)
        blocks.append(blocks[-1] + counted)
    # This is the painter's partition problem, solved by dynamic programming. best[s][i] is the least possible cost of
    # the slowest stage if the first i calls are on s stages.
    infinite = float("inf")
    best = [[infinite] * (num + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(1, num + 1):
            for start in range(end):
                if blocks[end] == blocks[start]:
                    continue
                cost = max(best[stage - 1][start], sums[end] - sums[start])
                if cost < best[stage][end]:
                    best[stage][end], cut[stage][end] = cost, start
    stages = [0] * num
    end = num
    for stage in range(num_stages, 0, -1):
        start = cut[stage][end]
        stages[start:end] = [stage - 1] * (end - start)
        end = start
    return stages


def split_by_hand(names: Sequence[str], split: Sequence[str], num_stages: int, all_names: Collection[str]) -> list[int]:
    """Return the stage of each call, where ``split`` names the parts with which the stages after the first begin.

    Args:
        names: The name of the part of each call, in the order of the calls.
        split: The names of parts, in the order of the stages; the beginning of a name may be left out (``4`` for
            ``layers.4``).
        num_stages: Number of stages of the pipeline, over all ranks: one more than there are names in ``split``.
        all_names: The names of all modules, for the error.

    Raises:
        ValueError: If a name matches no part or several, or the names are too many, too few or out of order.
    """
    if len(split) != num_stages - 1:
        raise ValueError(
            f"split={list(split)!r} names the first parts of {len(split)} stages, and there are {num_stages} stages:"
            f" name {num_stages - 1}, one for each stage but the first."
        )
    starts = []
    for wanted in split:
        found = [index for index, name in enumerate(names) if name == wanted or name.endswith(f".{wanted}")]
        if not found:
            close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
            hint = f" Did you mean {' or '.join(close)}?" if close else f" Parts are {', '.join(names)}."
            is_module = any(name.endswith(wanted) for name in all_names)
            what = "is a module, but no part with which a stage can begin" if is_module else "is no part of the model"
            raise ValueError(f"split={list(split)!r}: {wanted!r} {what}.{hint}")
        if len({names[index] for index in found}) > 1:
            both = " and ".join(names[index] for index in found[:2])
            raise ValueError(f"split={list(split)!r}: {wanted!r} matches {both}; write the whole name.")
        starts.append(found[0])
    if any(later <= earlier for earlier, later in zip([0, *starts], starts, strict=False)):
        raise ValueError(
            f"split={list(split)!r} must name parts after the first, in the order in which they are called:"
            f" {', '.join(names)}."
        )
    return [sum(index >= start for start in starts) for index in range(len(names))]
