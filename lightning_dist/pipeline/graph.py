"""What graphs between the parts of a model in one step.

A *part* is a module whose calls run on one stage only: a repeated block, or a module with parameters outside of the
blocks. All code between parts runs on every stage. So what a stage must be given is what parts of earlier stages
returned, as far as a part of this stage, or of a later one, or the end of the step makes something of it. A *value* is
a tensor that a part returned: the number of the call, and the tensor's place in the output.

Code between the parts may use parameters as well (a positional embedding that is added): these are needed wherever the
result is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from lightning_dist.tracing import RefusalError

__all__ = ["InnerCall", "Leaf", "NotFollowedError", "Output", "PartCall", "StepGraph", "TraceError", "Value"]

Value = tuple[int, int]
"""A tensor that a part returned: which call, which leaf of its output."""


class TraceError(RefusalError):
    """A step cannot be split into stages; the text says why, and what to do."""


class NotFollowedError(TraceError):
    """A step does not run to its end on tensors without values."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that a part returns."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    is_changed: bool = False
    """Whether code after the part changes it in place."""


@dataclass
class Output:
    """What a module returns.

    Args:
        leaves: The tensors; None for what is no tensor.
        constants: What there is besides tensors, in their places.
        structure: How they are nested.
    """

    leaves: list[Leaf | None] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    structure: TreeSpec | None = None

    @classmethod
    def of(cls, value: Any) -> Output:
        """What is to be known of ``value``."""
        leaves, structure = tree_flatten(value)
        known = [Leaf(t.shape, t.dtype, t.requires_grad) if isinstance(t, Tensor) else None for t in leaves]
        return cls(known, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


@dataclass
class InnerCall:
    """A call of a module inside a part, of whose output a hook has taken something.

    Args:
        name: The module's.
        occurrence: Which of its calls within the part's.
        args: What it is called with.
        output: What it returns.
        places: Of tensors that are taken: leaf of ``output`` to leaf of the part's.
    """

    name: str
    occurrence: int
    args: Output
    output: Output
    places: dict[int, int] = field(default_factory=dict)


@dataclass
class PartCall:
    """A call of a part.

    Args:
        name: The part's.
        uses: Values that it makes something of.
        params: Parameters that run in it or in what is made of the values on the way to it, by name.
        leaves: The tensors that it returns, None for what is no tensor; then those that hooks take from inside.
        output: What it returns.
        inner: Where hooks take something.
        cost: Time of its forward, in floating-point operations.
        draws: Of which generators it draws random numbers (see :class:`~lightning_dist.randomness.RngGenerators`).
    """

    name: str
    uses: set[Value] = field(default_factory=set)
    params: set[str] = field(default_factory=set)
    leaves: list[Leaf | None] = field(default_factory=list)
    output: Output = field(default_factory=Output)
    inner: list[InnerCall] = field(default_factory=list)
    cost: float = 0.0
    draws: frozenset[str] = frozenset()


@dataclass
class StepGraph:
    """One step.

    Args:
        calls: Of the parts, in order.
        end: What the loss, what is logged and what is kept is made of, as a call after the last; it draws what the code
            between the parts does.
        changes_batch: Whether the step changes tensors of the batch in place.
        params_between: Parameters that the code between parts uses, by name.
        changed: Attributes outside of parts that the step sets, or containers in them that it adds to: the module's
            name, and the attribute's.
        changed_inside: Attributes that the step changes and has changed back at its end.
        steady_buffers: Names of buffers in parts that the step changes, and not by what is in the batch.
        buffers_between: Names of buffers outside of parts that the step changes.
        logs_otherwise: Whether the step logs or returns what is no mean over samples.
        numbers: Plain numbers that the step logs or returns, in order.
        hooked: Tensors whose gradients the code between parts puts a hook on: the values that one is made of, and how
            many calls there are before that.
        of_whole_batch: The step on the batch that is not split, where what it leaves must be made of that.
    """

    calls: list[PartCall]
    end: PartCall
    changes_batch: bool
    params_between: frozenset[str] = frozenset()
    changed: tuple[tuple[str, str], ...] = ()
    changed_inside: tuple[tuple[str, str], ...] = ()
    steady_buffers: frozenset[str] = frozenset()
    buffers_between: frozenset[str] = frozenset()
    logs_otherwise: bool = False
    numbers: tuple[float, ...] = field(default=(), compare=False)
    hooked: tuple[tuple[frozenset[Value], int], ...] = ()
    of_whole_batch: StepGraph | None = field(default=None, compare=False)

    @cached_property
    def draws(self) -> frozenset[str]:
        """Of which generators anything in the step draws random numbers."""
        return self.end.draws.union(*(call.draws for call in self.calls))

    def uses_param(self, name: str) -> bool:
        """Return whether the step uses the parameter ``name``, between parts or in one of those that it calls."""
        return any(name in call.params or name.startswith(f"{call.name}.") for call in (*self.calls, self.end))

    @property
    def may_leave_more(self) -> bool:
        """Whether the whole batch may leave something else than its microbatches one after another."""
        return bool(self.changed or self.buffers_between or self.logs_otherwise or self.numbers)

    def with_whole_batch(self, whole: StepGraph) -> StepGraph:
        """Return this step, and beside it that on the whole batch, where what it leaves must be made of that."""
        is_like = [call.name for call in whole.calls] == [call.name for call in self.calls]
        is_due = self.changed or self.buffers_between or self.logs_otherwise or self.numbers != whole.numbers
        return replace(self, of_whole_batch=whole) if is_like and is_due else self

    def merged_with(self, other: StepGraph) -> StepGraph:
        """Return what is used in this step or in ``other``, which calls the same parts and decides otherwise."""
        calls = [_merged(call, also) for call, also in zip(self.calls, other.calls, strict=True)]
        changed = tuple(dict.fromkeys((*self.changed, *other.changed)))
        return StepGraph(
            calls,
            _merged(self.end, other.end),
            self.changes_batch or other.changes_batch,
            self.params_between | other.params_between,
            changed,
            tuple(dict.fromkeys((*self.changed_inside, *other.changed_inside))),
            self.steady_buffers & other.steady_buffers,
            self.buffers_between | other.buffers_between,
            self.logs_otherwise or other.logs_otherwise,
            self.numbers,
            tuple(dict.fromkeys((*self.hooked, *other.hooked))),
        )

    def crossing(self, stage_of: Callable[[int], int], stage: int) -> list[Value]:
        """The values that ``stage`` is given, in order: made before it, and used in it or after it."""
        consumers = [(stage_of(index), call) for index, call in enumerate(self.calls)]
        last = max((s for s, _ in consumers), default=0)
        used = {
            value
            for at, call in [*consumers, (max(last, stage), self.end)]
            if at >= stage
            for value in call.uses
            if stage_of(value[0]) < stage
        }
        return sorted(used)


def _merged(call: PartCall, other: PartCall) -> PartCall:
    leaves = [also if also is not None and also.is_changed else leaf
              for leaf, also in zip(call.leaves, other.leaves, strict=False)]  # fmt: skip
    return replace(
        call,
        uses=call.uses | other.uses,
        params=call.params | other.params,
        leaves=leaves + call.leaves[len(leaves) :],
        draws=call.draws | other.draws,
    )
