"""Which parts of a model are which stage: contiguous in the order of calls, the slowest stage as fast as can be."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from torch import nn

from lightning_dist.pipeline.graph import StepGraph, TraceError

__all__ = ["balanced", "costs", "split_by_hand"]

_BACKWARD = 2
"""A backward costs so many forwards: a product for the input's gradient, one for the weight's."""
_UPDATE = 30
"""A parameter costs as many floating-point operations in an optimizer step: gradient, two moments, weight."""


def costs(graph: StepGraph, root: nn.Module, num_microbatches: int) -> list[float]:
    """The time of each call in a step, in floating-point operations; the loss counts with the last."""
    params = dict(root.named_parameters(remove_duplicate=False))
    modules = dict(root.named_modules())
    found = []
    for call in graph.calls:
        own = set(modules[call.name].parameters()) | {params[name] for name in call.params}
        update = _UPDATE * sum(param.numel() for param in own) / num_microbatches
        found.append((1 + _BACKWARD) * call.cost + update)
    found[-1] += (1 + _BACKWARD) * graph.end.cost
    return found


def balanced(costs: Sequence[float], is_block: Sequence[bool], num_stages: int) -> list[int]:
    """The stage of each call: contiguous runs whose greatest sum is least; a stage has a block, where there are any.

    Args:
        costs: Of each call.
        is_block: Whether it is one of a repeated block.
        num_stages: How many stages there are.

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
    # best[s][i]: the least greatest sum of the first i calls on s stages; a painter's partition by dynamic programming.
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
    """The stage of each call, where ``split`` names the part that each stage but the first begins with.

    Args:
        names: Of the parts, in the order of calls.
        split: Names of parts; the beginning of a name may be left out.
        num_stages: How many stages there are.
        all_names: Of all modules, for the message.

    Raises:
        ValueError: If a name matches no part or several, or they are too many, too few or out of order.
    """
    if len(split) != num_stages - 1:
        raise ValueError(
            f"split={list(split)!r} names {len(split)} beginnings of stages, and there are {num_stages} stages: name"
            f" {num_stages - 1}, one for each stage but the first."
        )
    starts = []
    for wanted in split:
        found = [index for index, name in enumerate(names) if name == wanted or name.endswith(f".{wanted}")]
        if not found:
            close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
            hint = f" Did you mean {' or '.join(close)}?" if close else f" They are {', '.join(names)}."
            inside = " It is inside of one, and" if any(name.endswith(wanted) for name in all_names) else " It"
            raise ValueError(f"split={list(split)!r}: {wanted!r} is no part of the model.{inside} cannot be cut.{hint}")
        if len({names[index] for index in found}) > 1:
            both = " and ".join(names[index] for index in found[:2])
            raise ValueError(f"split={list(split)!r}: {wanted!r} is {both}; write the whole name.")
        starts.append(found[0])
    if any(later <= earlier for earlier, later in zip([0, *starts], starts, strict=False)):
        raise ValueError(
            f"split={list(split)!r} must be in the order in which the parts are called, after the first:"
            f" {', '.join(names)}."
        )
    return [sum(index >= start for start in starts) for index in range(len(names))]
