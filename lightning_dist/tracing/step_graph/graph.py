"""Describe which tensors the parts of a model pass to each other in one step.

A *part* is a module whose calls run on one stage only: a repeated block, or a module with parameters outside of the
blocks. All code between parts runs on every stage. A stage must therefore receive those tensors from parts of earlier
stages that a part of this stage, a part of a later stage, or the end of the step uses. A *value* is a tensor that a
part returned. It is identified by the index of the part's call and the index of the tensor among the output's leaves.

Code between the parts may use parameters as well, such as a positional embedding that it adds. These are needed on
every stage that uses the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_dist._compat import TreeSpec, tree_flatten
from lightning_dist.tracing.step_graph.changes_after_parts import Undone
from lightning_dist.tracing.step_graph.errors import TraceError

__all__ = ["InnerCall", "Leaf", "Output", "PartCall", "StepGraph", "Value"]

Value = tuple[int, int]
"""A tensor that a part returned: the index of the part's call, and the index of the leaf in its output."""


@dataclass(frozen=True)
class Leaf:
    """Describe a tensor that a part returns.

    Args:
        shape: Shape of the tensor in the traced step.
        dtype: Dtype of the tensor in the traced step.
        requires_grad: Whether the tensor requires a gradient in the traced step.
        is_changed: Whether code after the part changes the tensor in place.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    is_changed: bool = False


@dataclass
class Output:
    """Describe the output of a module as a flattened pytree.

    Args:
        leaves: For each leaf, the description of the tensor; None if the leaf is not a tensor.
        constants: For each leaf, the leaf itself if it is not a tensor; else None.
        structure: The tree from which the leaves were flattened.
    """

    leaves: list[Leaf | None] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    structure: TreeSpec | None = None

    @classmethod
    def of(cls, value: Any) -> Output:
        """Describe ``value``, which a module has returned or is called with."""
        leaves, structure = tree_flatten(value)
        known = [Leaf(t.shape, t.dtype, t.requires_grad) if isinstance(t, Tensor) else None for t in leaves]
        return cls(known, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


@dataclass
class InnerCall:
    """Describe a call of a module inside a part, from whose output a forward hook takes tensors out of the part.

    Args:
        name: Full name of the module.
        occurrence: The index of this call among the module's calls within one call of the part.
        args: Description of the positional arguments of the call.
        output: Description of the result of the call.
        places: The index of each taken tensor in the leaves of the part's call, by its index in ``output``.
    """

    name: str
    occurrence: int
    args: Output
    output: Output
    places: dict[int, int] = field(default_factory=dict)


@dataclass
class PartCall:
    """Describe a call of a part.

    Args:
        name: Full name of the part.
        uses: The values that the call uses, directly or through tensors that code between parts computed from them.
        params: The names of the parameters that the call uses, directly or through tensors that code between parts
            computed from them.
        leaves: The leaves of the output, with None for a leaf that is not a tensor, followed by the tensors that hooks
            take from modules inside the part.
        output: Description of the result of the call, including the leaves that are not tensors.
        inner: The calls of modules inside the part from which hooks take tensors.
        cost: The estimated time of the forward, in floating-point operations.
        draws: The kinds of random number generators that the call draws from (see
            :class:`~lightning_dist.model.randomness.RngGenerators`).
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
    """Describe one step.

    Args:
        calls: The calls of the parts, in order.
        end: The end of the step, as a call after the last: it uses the values from which the loss, the logged tensors
            and the tensors in attributes are computed. Its ``draws`` and ``cost`` are those of all code between parts.
        changes_batch: Whether the step changes tensors of the batch in place.
        params_between: The names of the parameters that the code between parts uses.
        changed: The attributes of modules outside of parts that the step sets, or whose containers it changes, each
            as the module's name and the attribute's name.
        restored_attributes: The attributes that the step changes and has restored at its end, named in the same way.
        changed_in_parts: The attributes of modules in parts that the step changes, except tensors, named in the same
            way.
        batch_independent_buffers: The names of the buffers in parts that the step changes to values independent of the
            batch.
        batch_buffers: The names of the other buffers in parts that the step changes.
        buffers_between: The names of the buffers outside of parts that the step changes.
        logs_otherwise: Whether the step logs or returns a value that is not a mean over samples.
        numbers: The Python numbers that the step logs or returns, in order.
        hooked: The tensors on which the code between parts registers a gradient hook, each as a pair: the values from
            which it is computed, and the number of calls of parts before the hook is registered.
        undone: What the step sets in modules of parts for their calls, and has undone at its end.
        left_after_calls: For each part, the name of an attribute or a buffer in it that the step sets after its call.
        of_whole_batch: The graph of the same step on the whole batch, if the attributes, buffers or logged values that
            the step leaves must be computed from the whole batch; else None.
        log_sizes: The ``batch_size`` of each call of ``self.log`` that has one. A call is a name, and the number of the
            call with this name, from 1.
        fixed_sizes: The calls among these whose ``batch_size`` does not depend on the size of the batch.
        has_fixed_numbers: Whether ``numbers`` are known not to depend on the size of the batch.
    """

    calls: list[PartCall]
    end: PartCall
    changes_batch: bool
    params_between: frozenset[str] = frozenset()
    changed: tuple[tuple[str, str], ...] = ()
    restored_attributes: tuple[tuple[str, str], ...] = ()
    changed_in_parts: tuple[tuple[str, str], ...] = ()
    batch_independent_buffers: frozenset[str] = frozenset()
    batch_buffers: frozenset[str] = frozenset()
    buffers_between: frozenset[str] = frozenset()
    logs_otherwise: bool = False
    numbers: tuple[float, ...] = field(default=(), compare=False)
    hooked: tuple[tuple[frozenset[Value], int], ...] = ()
    undone: Undone = field(default_factory=Undone)
    left_after_calls: tuple[tuple[str, str], ...] = ()
    of_whole_batch: StepGraph | None = field(default=None, compare=False)
    log_sizes: Mapping[tuple[str, int], int] = field(default_factory=dict, compare=False)
    fixed_sizes: frozenset[tuple[str, int]] = field(default=frozenset(), compare=False)
    has_fixed_numbers: bool = field(default=False, compare=False)

    @cached_property
    def draws(self) -> frozenset[str]:
        """Return the kinds of random number generators that the step draws from, in parts or between them."""
        return self.end.draws.union(*(call.draws for call in self.calls))

    def uses_param(self, name: str) -> bool:
        """Return whether the step uses the parameter ``name``, between parts or in a part that it calls."""
        return any(name in call.params or name.startswith(f"{call.name}.") for call in (*self.calls, self.end))

    @property
    def may_leave_more(self) -> bool:
        """Return whether a step on the whole batch may leave or log other values than steps on its microbatches."""
        return bool(self.changed or self.buffers_between or self.logs_otherwise or self.numbers or self.log_sizes)

    def with_fixed_sizes(self, whole: StepGraph) -> StepGraph:
        """Return this step with ``fixed_sizes`` and ``has_fixed_numbers`` set.

        Args:
            whole: The same step, traced on the whole batch.
        """
        fixed = (call for call, size in self.log_sizes.items() if whole.log_sizes.get(call) == size)
        return replace(self, fixed_sizes=frozenset(fixed), has_fixed_numbers=self.numbers == whole.numbers)

    def with_whole_batch(self, whole: StepGraph) -> StepGraph:
        """Return this step with ``of_whole_batch`` set to ``whole``, if its side effects must cover the whole batch.

        These are attributes, buffers and logged values. The step is returned unchanged if they are the same for
        microbatches, or if ``whole`` calls other parts.

        Args:
            whole: The same step, traced on the whole batch.
        """
        is_like = [call.name for call in whole.calls] == [call.name for call in self.calls]
        is_due = self.changed or self.buffers_between or self.logs_otherwise or self.numbers != whole.numbers
        return replace(self, of_whole_batch=whole) if is_like and is_due else self

    def merged_with(self, other: StepGraph) -> StepGraph:
        """Return a graph with everything that this step or ``other`` uses or changes.

        Args:
            other: The same step with other outcomes of its decisions, which calls the same parts.
        """
        calls = [_merged(call, also) for call, also in zip(self.calls, other.calls, strict=True)]
        changed = tuple(dict.fromkeys((*self.changed, *other.changed)))
        batch_buffers = self.batch_buffers | other.batch_buffers
        return StepGraph(
            calls,
            _merged(self.end, other.end),
            self.changes_batch or other.changes_batch,
            self.params_between | other.params_between,
            changed,
            tuple(dict.fromkeys((*self.restored_attributes, *other.restored_attributes))),
            tuple(dict.fromkeys((*self.changed_in_parts, *other.changed_in_parts))),
            (self.batch_independent_buffers | other.batch_independent_buffers) - batch_buffers,
            batch_buffers,
            self.buffers_between | other.buffers_between,
            self.logs_otherwise or other.logs_otherwise,
            self.numbers,
            tuple(dict.fromkeys((*self.hooked, *other.hooked))),
            self.undone | other.undone,
            tuple(dict.fromkeys((*self.left_after_calls, *other.left_after_calls))),
            log_sizes=dict(self.log_sizes.items() & other.log_sizes.items()),
        )

    def crossing(self, stage_of: Callable[[int], int], stage: int) -> list[Value]:
        """Return, in order, the values that ``stage`` receives: those of earlier stages that it or a later one uses.

        Args:
            stage_of: Function that returns the stage of the call with a given index.
            stage: The receiving stage. The number of stages stands for the end of the step.
        """
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
    """Return a call with everything that ``call`` or ``other`` uses.

    Raises:
        TraceError: If hooks take other tensors out of the part in one of the calls, so that the values have other
            indices.
    """
    one, two = (
        {(inner.name, inner.occurrence, leaf, place) for inner in made.inner for leaf, place in inner.places.items()}
        for made in (call, other)
    )
    if one < two:
        call, other = other, call  # A stage takes the tensors of both, whichever of them the step uses.
    elif not one >= two:
        raise TraceError(
            f"The step decides by a value of a tensor which tensors its forward hooks take out of {call.name}: a"
            " pipeline would have to send other tensors for each outcome. Let the hooks take the same ones always."
        )
    leaves = [also if also is not None and also.is_changed else leaf
              for leaf, also in zip(call.leaves, other.leaves, strict=False)]  # fmt: skip
    return replace(
        call,
        uses=call.uses | other.uses,
        params=call.params | other.params,
        leaves=leaves + call.leaves[len(leaves) :],
        draws=call.draws | other.draws,
    )
