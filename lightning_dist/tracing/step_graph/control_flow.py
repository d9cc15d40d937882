"""Trace a step whose control flow depends on values of tensors once for each outcome of its decisions.

Fake tensors have no values. A step that reads values is given made-up ones. It then runs again with the opposite
outcome of each of its decisions, and with very large and very small numbers. A stage sends to the next one every tensor
that any of these runs needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from lightning_dist.tracing.step_graph.errors import NotTraceableError
from lightning_dist.tracing.step_graph.fake_run import FailureReason, Observer, run_on_fakes
from lightning_dist.tracing.step_graph.reentrant_checkpointing import checkpointing_without_reentry
from lightning_dist.tracing.step_graph.tensor_reads import MadeUpValues, ReadValues

__all__ = ["Branch", "run_all_branches"]

_MAX_DECISIONS = 12
"""Maximum number of decisions of which both outcomes are traced; of later decisions, one outcome is traced."""

_NUMBERS = (1e30, -1e30)
"""Made-up values above and below any number with which a step compares a value."""


class StepObserver(Observer, Protocol):
    """Observe a step that may read values of tensors."""

    def is_between(self) -> bool:
        """Return whether the outcome of a decision that the step takes now may matter."""

    def count_calls(self) -> int:
        """Return how many parts of the model the step has called so far."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Handle a call of ``self.log``."""


SomeObserver = TypeVar("SomeObserver", bound=StepObserver)


@dataclass(frozen=True)
class Branch(Generic[SomeObserver]):
    """Represent one run of a step on fake tensors.

    Args:
        observer: The observer that recorded the run.
        by_number: Whether the run differs from the first one in its made-up numbers, rather than in one decision.
    """

    observer: SomeObserver
    by_number: bool = False


def run_all_branches(
    make: Callable[[], SomeObserver], root: nn.Module, step: Callable[..., Any], device: torch.device
) -> Iterator[Branch[SomeObserver]]:
    """Trace a step along each branch that its decisions can take; a step that reads no values has one branch.

    Args:
        make: Function that creates the observer of one run; it is called once for each run.
        root: The user's module, on any device; it is unchanged afterwards.
        step: Function that runs the step. It is given a function that returns a fake tensor for a tensor of the batch,
            and, as ``on_log``, a function to call with the arguments of ``self.log``.
        device: Device that the fake tensors pretend to be on.

    Yields:
        The first branch on which the step raises no exception, then the others.

    Raises:
        NotTraceableError: If the step raises an exception on every branch, or does not end.
        Exception: The error of the step's own code that it raises before it reads any value, as in one process.
    """

    def run(observer: SomeObserver, values: MadeUpValues | None) -> str:
        if values is not None:
            values.may_decide, values.count_calls = observer.is_between, observer.count_calls
        with checkpointing_without_reentry():
            return run_on_fakes(root, partial(step, on_log=observer.on_log), device, observer, True, values)

    observer = make()
    why_not = run(observer, None)
    if not why_not:
        yield Branch(observer)
        return
    if isinstance(why_not, FailureReason) and why_not.fails_on_real_tensors:
        raise why_not.error
    found = _without_exception(make, run, ReadValues())
    if isinstance(found, str):
        why_not = found or why_not
        looks = any(name in why_not for name in _ABOUT_VALUES)
        raise NotTraceableError(
            f"The step could not be traced on tensors without values ({why_not}): before a pipeline splits a model,"
            " it must know which tensors the blocks pass to each other."
            + (" The step reads values of tensors; do that in a callback, or after the model has run." if looks else "")
            + " If sizes in the step depend on values, as those of packed sequences do, use a strategy without stages."
        )
    first, values = found
    yield Branch(first)
    decisions = values.decisions[:_MAX_DECISIONS]
    for index, decision in enumerate(decisions):
        other = _without_exception(make, run, ReadValues((*decisions[:index], not decision)))
        if not isinstance(other, str):  # Otherwise the decision is a check in the user's code that raises an error.
            yield Branch(other[0])
    for number in _NUMBERS if values.has_read_numbers else ():
        other = _without_exception(make, run, ReadValues(tuple(decisions), number))
        if not isinstance(other, str):
            yield Branch(other[0], by_number=True)


_ABOUT_VALUES = ("DataDependent", "Symbolic", "SymInt", "SymFloat", "SymBool")


def _without_exception(
    make: Callable[[], SomeObserver], run: Callable[[SomeObserver, MadeUpValues | None], str], read_values: ReadValues
) -> tuple[SomeObserver, MadeUpValues] | str:
    """Trace the step with the values of ``read_values``, and try other decisions as long as it raises an exception.

    Each new run sets the last decision to True that was False and that ``read_values`` does not prescribe.

    Returns:
        The observer and the made-up values of the first run without an exception; or, if all runs raise one, the
        reason why the first run failed.
    """
    num_fixed, why_not = len(read_values.decisions), ""
    for _ in range(_MAX_DECISIONS):
        observer, values = make(), MadeUpValues(read_values)
        reason = run(observer, values)
        if not reason:
            return observer, values
        why_not = why_not or reason
        free = [index for index in range(num_fixed, len(values.decisions)) if not values.decisions[index]]
        if not free:
            break
        read_values = ReadValues((*values.decisions[: free[-1]], True), read_values.number)
    return why_not
