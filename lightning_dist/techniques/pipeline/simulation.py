"""Simulate a schedule on equal ranks whose messages take no time, to find the least bubble that it can reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from lightning_dist.mesh.timeline import Action, Kind, Order, Span, Timeline, messages

__all__ = ["EVEN", "order_of", "simulate"]

EVEN: Mapping[Kind, float] = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Time of each kind of action, where a forward and either part of a backward take one unit."""


def order_of(schedule: Any, pp_size: int, num_microbatches: int) -> Order:
    """Return the actions of each rank under ``schedule``, in order.

    Args:
        schedule: A schedule of :mod:`torch.distributed.pipelining` that runs backwards.
        pp_size: The number of ranks of the pipeline.
        num_microbatches: The number of microbatches in a step.
    """
    numbers = range(num_microbatches)
    if isinstance(schedule, ScheduleGPipe):
        return [[Action(kind, rank, n) for kind in ("F", "B") for n in numbers] for rank in range(pp_size)]
    if isinstance(schedule, Schedule1F1B):
        # The schedule's own _get_pipeline_order is not used, because it numbers the last rank's forwards from 1
        # (torch 2.13).
        return [_one_forward_one_backward(rank, pp_size, num_microbatches) for rank in range(pp_size)]
    return [[_action(found) for found in _flat(schedule.pipeline_order[rank])] for rank in range(pp_size)]


def _one_forward_one_backward(rank: int, pp_size: int, num_microbatches: int) -> list[Action]:
    warmup = min(num_microbatches, pp_size - rank)
    order = [Action("F", rank, n) for n in range(warmup)]
    for n in range(num_microbatches):
        order.append(Action("B", rank, n))
        if n + warmup < num_microbatches:
            order.append(Action("F", rank, n + warmup))
    return order


def _flat(actions: Any) -> Iterator[Any]:
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


def _action(found: Any) -> Action:
    return Action(cast(Kind, found.computation_type.value), found.stage_index, found.microbatch_index)


def simulate(order: Order, costs: Mapping[Kind, float] = EVEN) -> Timeline:
    """Simulate ``order``: each action starts as soon as its rank is free and the actions that it depends on have ended.

    For GPipe and 1F1B with P ranks and M microbatches the bubble is (P - 1) / (M + P - 1). For interleaved schedules
    with v stages per rank it is (P - 1) / (v M + P - 1). (Narayanan et al., 2021, give it as a fraction of the ideal
    time instead: (P - 1) / (v M).)

    Args:
        order: The actions of each rank, in the order in which the rank runs them.
        costs: The time of each kind of action, in any unit.

    Raises:
        ValueError: If the order deadlocks, because ranks would wait for each other forever.
    """
    ends: dict[Action, float] = {}
    spans: list[Span] = []
    planned = {action for actions in order for action in actions}
    places, free = [0] * len(order), [0.0] * len(order)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, actions in enumerate(order):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                needed = [other for other in (*messages(action), *_own_needs(action)) if other in planned]
                if any(other not in ends for other in needed):
                    break
                start = max([free[rank], *(ends[other] for other in needed)])
                free[rank] = ends[action] = start + costs[action.kind]
                spans.append(Span(rank, action, start, ends[action]))
                places[rank] += 1
                has_moved = True
    if len(spans) < len(planned):
        raise ValueError("The order of actions deadlocks: ranks would wait for each other for ever.")
    return Timeline(len(order), sorted(spans, key=lambda span: (span.start, span.rank)))


def _own_needs(action: Action) -> list[Action]:
    before: Mapping[Kind, list[Kind]] = {"F": [], "B": ["F"], "I": ["F"], "W": ["I"]}
    return [action._replace(kind=kind) for kind in before[action.kind]]
