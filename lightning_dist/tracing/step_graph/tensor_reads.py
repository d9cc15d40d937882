"""Make up the values that a step reads from fake tensors, and record the decisions that depend on them.

Fakes have no values for reads such as ``loss.item()``, ``f"{loss:.3f}"`` or ``if torch.isnan(loss)``, most of which
only print or check something. Such a read returns a made-up value. Every decision that depends on one (an ``if``, an
``assert``) is recorded, so that the step can be run again with the other outcome.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dist.tracing.step_graph.errors import LoopByValueError
from lightning_dist.tracing.step_graph.watched_numbers import watched

__all__ = ["READS", "TEXTS", "MadeUpValues", "ReadValues"]

READS = frozenset({
    "item", "tolist", "numpy", "__float__", "__int__", "__index__", "__bool__", "__complex__", "__array__",
    "__contains__", "is_nonzero", "equal", "allclose",
})  # fmt: skip
"""Names of the functions that return values of a tensor as something other than a tensor."""

TEXTS = frozenset({"__repr__", "__str__", "__format__"})
"""Names of the methods that return the values of a tensor as text."""

_DECISIONS = frozenset({"__bool__", "__contains__", "is_nonzero", "equal", "allclose"})
_CONVERSIONS = {"__float__": float, "__int__": int, "__index__": int, "__complex__": complex}


_MAX_ALIKE = 64
"""Number of decisions in a row that one running function may take at one line before their outcomes alternate.

A loop that ends when a tensor becomes true would not end otherwise, and the number of its turns does not matter."""

_MAX_LOOPS_OVER_PARTS = 32
"""Number of decisions at one line between which the step has called parts each time, after which the trace ends."""

_MAX_DECISIONS = 20_000
"""Number of decisions of one run of a step after which the trace ends."""


@dataclass(frozen=True)
class ReadValues:
    """Represent the values that reads of fake tensors return.

    Args:
        decisions: Outcomes of the first decisions of a step; all later ones are False, except in a loop that would not
            end otherwise.
        number: Value of every element that is read as a number.
    """

    decisions: tuple[bool, ...] = ()
    number: float = 1.0


class MadeUpValues(TorchFunctionMode):
    """Return made-up values where code reads fake tensors, and record the decisions that depend on them.

    Args:
        read_values: The outcomes of decisions, and the number, that one run of the step reads.
    """

    def __init__(self, read_values: ReadValues) -> None:
        super().__init__()
        self._read_values = read_values
        self.decisions: list[bool] = []
        self.has_read_numbers = False
        self.may_decide: Callable[[], bool] = lambda: True
        """Function that returns whether a decision may matter now; if not, it is unrecorded and its value is False."""
        self.count_calls: Callable[[], int] = lambda: 0
        """Function that returns how many parts of the model the step has called so far."""
        self._num_decisions = self._num_alike = 0
        self._last_place: tuple[FrameType, int] | None = None
        self._num_loops: Counter[tuple[CodeType, int]] = Counter()
        self._num_calls_at: dict[tuple[CodeType, int], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return a made-up value if ``func`` reads a tensor, and run any other function."""
        name = getattr(func, "__name__", "")
        if func is torch.nn.functional.ctc_loss:
            return _ctc_loss(*args, **(kwargs or {}))
        if not args or not isinstance(args[0], Tensor) or (name not in READS and name not in TEXTS):
            return func(*args, **(kwargs or {}))
        if name in TEXTS:
            return "0.0"
        if name in _DECISIONS:
            return self._decide()
        tensor = args[0]
        self.has_read_numbers |= name != "item" and self.may_decide()
        if name in ("numpy", "__array__"):
            return np.full(tuple(tensor.shape), self._made_up(tensor), str(tensor.dtype).removeprefix("torch."))
        if name == "tolist":
            return _nested(tensor.shape, lambda: False if tensor.dtype == torch.bool else self._number(tensor))
        number = self._number(tensor)
        return _CONVERSIONS[name](number) if name in _CONVERSIONS else number

    def _made_up(self, tensor: Tensor) -> Any:
        if tensor.is_floating_point():
            return self._read_values.number
        return int(max(min(self._read_values.number, 2**15), 0))

    def _number(self, tensor: Tensor) -> Any:
        if tensor.dtype == torch.bool:
            return self._decide()
        return watched(self._made_up(tensor), None, self._answer)

    def _answer(self, question: Callable[[], Any], answer: Any) -> Any:
        return self._decide() if isinstance(answer, bool) else answer

    def _decide(self) -> bool:
        is_forced = self._is_in_endless_loop()
        if not self.may_decide():
            return is_forced
        place, known = len(self.decisions), self._read_values.decisions
        self.decisions.append(known[place] if place < len(known) else is_forced)
        return self.decisions[-1]

    def _is_in_endless_loop(self) -> bool:
        """Return whether this decision must be True, so that a loop that waits for a tensor to become true ends.

        Raises:
            LoopByValueError: If the loop calls parts of the model, so that their number depends on values.
        """
        frame, line = _place_in_code()
        self._num_decisions += 1
        is_as_before = self._last_place is not None and self._last_place[0] is frame and self._last_place[1] == line
        self._num_alike = self._num_alike + 1 if is_as_before else 1
        self._last_place = (frame, line)
        place, num_calls = (frame.f_code, line), self.count_calls()
        if self._num_calls_at.get(place, num_calls) != num_calls:
            self._num_loops[place] += 1
        self._num_calls_at[place] = num_calls
        if self._num_loops[place] >= _MAX_LOOPS_OVER_PARTS or self._num_decisions >= _MAX_DECISIONS:
            what = "calls parts of the model" if self._num_loops[place] >= _MAX_LOOPS_OVER_PARTS else "runs"
            raise LoopByValueError(
                f"The step {what} in a loop whose end the value of a tensor decides, at"
                f" {frame.f_code.co_filename}:{line}: after {self._num_decisions} decisions, its run on tensors without"
                " values has not ended. Let the loop have a fixed number of turns, or use a strategy without stages."
            )
        return self._num_alike > _MAX_ALIKE and self._num_alike % 2 == 0


def _place_in_code() -> tuple[FrameType, int]:
    """Return the innermost frame of code that is neither torch's nor this package's, and the line that it is at."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "lightning_dist.")):
        frame = frame.f_back
    return frame, frame.f_lineno


def _ctc_loss(log_probs: Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Tensor:
    """Stand in for ``torch.nn.functional.ctc_loss``, which reads the lengths of sequences in C++."""
    reduction = args[4] if len(args) > 4 else reduction
    each = log_probs.mean((0, 2)) if log_probs.ndim == 3 else log_probs.mean()
    return each if reduction == "none" else each.mean()


def _nested(shape: Sequence[int], number: Callable[[], Any]) -> Any:
    return [_nested(shape[1:], number) for _ in range(shape[0])] if len(shape) else number()
