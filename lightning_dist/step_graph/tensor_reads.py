"""Make up the values that a step reads from fake tensors, and record the decisions that depend on them.

Fakes have no values for reads such as ``loss.item()``, ``f"{loss:.3f}"`` or ``if torch.isnan(loss)``, most of which
only print or check something. Such a read returns a made-up value. Every decision that depends on one (an ``if``, an
``assert``) is recorded, so that the step can be run again with the other outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dist.step_graph.watched_numbers import watched

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


@dataclass(frozen=True)
class ReadValues:
    """Represent the values that reads of fake tensors return.

    Args:
        decisions: Outcomes of the first decisions of a step; all later ones are False.
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
        return watched(self._made_up(tensor), lambda: None, self._answer)

    def _answer(self, question: Callable[[], Any], answer: Any) -> Any:
        return self._decide() if isinstance(answer, bool) else answer

    def _decide(self) -> bool:
        if not self.may_decide():
            return False
        place, known = len(self.decisions), self._read_values.decisions
        self.decisions.append(known[place] if place < len(known) else False)
        return self.decisions[-1]


def _ctc_loss(log_probs: Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Tensor:
    """Stand in for ``torch.nn.functional.ctc_loss``, which reads the lengths of sequences in C++."""
    reduction = args[4] if len(args) > 4 else reduction
    each = log_probs.mean((0, 2)) if log_probs.ndim == 3 else log_probs.mean()
    return each if reduction == "none" else each.mean()


def _nested(shape: Sequence[int], number: Callable[[], Any]) -> Any:
    return [_nested(shape[1:], number) for _ in range(shape[0])] if len(shape) else number()
