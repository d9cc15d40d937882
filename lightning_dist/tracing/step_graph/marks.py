"""Mark the tensors of a traced step with what they were computed from.

A mark is an attribute of a fake tensor. It is set where the tensor is made, and holds for its views as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_dist._compat import base_of
from lightning_dist.tracing.step_graph.graph import Value

__all__ = ["Marks", "history_of", "marks_of"]


@dataclass(frozen=True)
class Marks:
    """Hold what a tensor was computed from.

    Args:
        values: The values, that is, tensors that parts returned, from which the tensor was computed.
        params: Full names of the parameters from which code between parts computed the tensor.
    """

    values: frozenset[Value] = frozenset()
    params: frozenset[str] = frozenset()

    def __or__(self, other: Marks) -> Marks:
        return Marks(self.values | other.values, self.params | other.params)


_NOTHING = Marks()


def marks_of(tensor: Tensor) -> Marks:
    """Return the marks of ``tensor``, and those of its base, which may have been changed through another view."""
    marks: Marks = tensor.__dict__.get("_marks", _NOTHING)
    base = base_of(tensor)
    return marks if base is None else marks | base.__dict__.get("_marks", _NOTHING)


def history_of(tensor: Tensor) -> tuple[int, int]:
    """Return two hashes of the operations that computed ``tensor``: without and with the numbers in their arguments."""
    name = tensor.__dict__.get("_param_name")
    made: tuple[int, int] = tensor.__dict__.get("_history", (0, 0))
    base = base_of(tensor)
    of_base = (0, 0) if base is None else base.__dict__.get("_history", (0, 0))
    return (hash((name, made[0], of_base[0])), hash((name, made[1], of_base[1])))
