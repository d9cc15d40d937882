"""Following a step that looks at values of tensors: once for each way that its decisions can go.

Fakes have no values. A step that looks at some is given made-up ones, and runs again with each of its decisions taken
the other way, and with numbers that are very large and very small: what any of these runs needs is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_dist.pipeline.graph import NotFollowedError
from lightning_dist.tensor_reads import MadeUpValues, Script
from lightning_dist.tracing import WhyNot

__all__ = ["Way", "follow_ways"]

_MOST_DECISIONS = 12
"""Decisions by values that are followed both ways; later ones are followed one way."""

_NUMBERS = (1e30, -1e30)
"""Numbers on either side of whatever a step compares a value with."""

Observer = TypeVar("Observer")


@dataclass(frozen=True)
class Way(Generic[Observer]):
    """A run of a step on fakes.

    Args:
        observer: What has seen it.
        by_number: Whether it differs from the first run by made-up numbers, and not by a decision.
    """

    observer: Observer
    by_number: bool = False


def follow_ways(
    make: Callable[[], Observer], run: Callable[[Observer, MadeUpValues | None], str]
) -> Iterator[Way[Observer]]:
    """Follow a step; a step that looks at no values has one way.

    Args:
        make: Makes an observer.
        run: Runs the step for an observer, with answers for where it looks at values; returns why it could not.

    Yields:
        The first way that the step takes without an exception, then the others.

    Raises:
        NotFollowedError: If it takes none.
        Exception: What the step's own code raises before it looks at any value, as it would in one process.
    """
    observer = make()
    why_not = run(observer, None)
    if not why_not:
        yield Way(observer)
        return
    if isinstance(why_not, WhyNot) and why_not.is_of_the_code:
        raise why_not.error
    found = _without_exception(make, run, Script())
    if isinstance(found, str):
        why_not = found or why_not
        looks = any(name in why_not for name in _ABOUT_VALUES)
        raise NotFollowedError(
            f"The step could not be followed on tensors without values ({why_not}): a pipeline must know what graphs"
            " between a model's blocks before it splits them."
            + (" The step looks at values of tensors; do that in a callback, or behind the model." if looks else "")
            + " If sizes in the step depend on values, as those of packed sequences do, use a strategy without stages."
        )
    first, values = found
    yield Way(first)
    decisions = values.decisions[:_MOST_DECISIONS]
    for index, decision in enumerate(decisions):
        other = _without_exception(make, run, Script((*decisions[:index], not decision)))
        if not isinstance(other, str):  # else it is a check of the user's that raises
            yield Way(other[0])
    for number in _NUMBERS if values.has_read_numbers else ():
        other = _without_exception(make, run, Script(tuple(decisions), number))
        if not isinstance(other, str):
            yield Way(other[0], by_number=True)


_ABOUT_VALUES = ("DataDependent", "Symbolic", "SymInt", "SymFloat", "SymBool")


def _without_exception(
    make: Callable[[], Observer], run: Callable[[Observer, MadeUpValues | None], str], script: Script
) -> tuple[Observer, MadeUpValues] | str:
    """Follow the step by ``script``; where it raises, with its latest free decision taken the other way.

    Returns:
        What has seen it; or why it raises at first, if it raises every way.
    """
    num_fixed, why_not = len(script.decisions), ""
    for _ in range(_MOST_DECISIONS):
        observer, values = make(), MadeUpValues(script)
        reason = run(observer, values)
        if not reason:
            return observer, values
        why_not = why_not or reason
        free = [index for index in range(num_fixed, len(values.decisions)) if not values.decisions[index]]
        if not free:
            break
        script = Script((*values.decisions[: free[-1]], True), script.number)
    return why_not
