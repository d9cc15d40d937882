"""Simulate a schedule on equal ranks whose messages take no time, to find the least bubble that it can reach."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_dist.mesh.timeline import Action, Kind, Order, Span, Timeline, messages

__all__ = ["EVEN", "simulate"]

EVEN: Mapping[Kind, float] = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Time of each kind of action, where a forward and either part of a backward take one unit."""


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
