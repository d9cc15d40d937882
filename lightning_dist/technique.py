"""Define the protocol of techniques: what may change how a module runs, and at which points.

A technique (sharding, tensor parallelism, pipeline stages, activation checkpointing, ...) is one object in the list
that :func:`lightning_dist.parallelize.parallelize` builds. :class:`~lightning_dist.parallel_module.ParallelModule`
calls the techniques at the points below. It knows none of them by name. A new technique is one file and one entry in
the list.

The contract:

- **Order.** The list goes from the outside in, as nested ``with`` statements do. What comes *before* something
  (``before_step``, entering a context) is called in the order of the list, and what comes *after* it
  (``finish_output``, ``after_backward``, leaving a context) in the reverse order. Units are prepared from the inside
  out (:meth:`Technique.prepare_unit`), so that an outer technique sees what the inner ones have made of a unit.
- **Parameter groups.** The parameters of each unit are managed by exactly one group, which the first technique whose
  :meth:`Technique.manage_unit` returns one gives. Optimizers, callbacks and checkpoints see the parameters as the group
  leaves them when it is free; a step sees them gathered.
- **Gathered parameters.** :meth:`Technique.on_gather` is called when the gathered parameters of a unit are about to be
  used, also if they have been gathered before: after FSDP2's pre-forward hook, which gathers them, and before the
  forward. :meth:`Technique.on_free` is called after the forward, before FSDP2's post-forward hook frees them.
- **Cost.** The methods that a technique overrides are looked up once, when the module is built (see :func:`bound`). A
  technique that does nothing at a point costs nothing there.
- **Errors.** A technique that raises on one rank must raise on all of them, or say in its docstring which collective
  the other ranks would wait in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from lightning_dist.parameter_group import ParameterGroup
from lightning_dist.units import Unit

__all__ = ["Parallel", "Points", "Rows", "Technique", "bound"]

Rows = Iterable[tuple[str, str]]
"""Rows of the table at the start of a run: a label, which is empty where a row continues the last one, and a text."""


class Parallel(Protocol):
    """Describe what a technique may ask of its :class:`~lightning_dist.parallel_module.ParallelModule`."""

    module: nn.Module
    """The user's module."""

    units: tuple[Unit, ...]
    """The units whose parameters this rank has a part in."""

    groups: tuple[ParameterGroup, ...]
    """The group of each unit; it is there when :meth:`Technique.finish` is called."""

    techniques: tuple[Technique, ...]
    """All techniques, from the outside in."""

    stays_gathered: bool
    """Whether every rank holds the whole model, so that nothing is gathered or freed."""

    runs_microbatches: bool
    """Whether microbatches of a pipeline run now."""

    @property
    def reduces_gradients(self) -> bool:
        """Return whether a backward reduces gradients over the ranks, or each rank adds up its own (accumulation)."""

    def gradients_left(self) -> list[str]:
        """Return the names of parameters with a gradient that the optimizer would not see."""


class Technique:
    """Change how a module runs. Every method here does nothing; a technique overrides those that it needs."""

    runs_before_first_step: ClassVar[bool] = True
    """Whether the module may be called, on all ranks, before its first step, as Lightning's ModelSummary does."""

    # While the module is built, once; in this order.

    def select_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return the units whose parameters this rank has a part in, of those of the whole module."""
        return units

    def remote_tensors(self) -> Collection[Tensor]:
        """Return the parameters and buffers that only other ranks have; they stay on the meta device here."""
        return ()

    def attach(self, parallel: Parallel) -> None:
        """Take what the technique needs of the module that is built.

        Args:
            parallel: The module, its units and all techniques; the parameters have no groups yet.
        """

    def prepare_unit(self, unit: Unit) -> None:
        """Change a unit before its parameters get their group: replace parameters, or the forwards of its modules.

        Args:
            unit: A unit whose tensors have values. ``unit.params`` must be kept up to date.
        """

    def shard_dim(self, param: nn.Parameter) -> int | None:
        """Return the dimension that ``param`` must be sharded along; None leaves the choice to who shards it."""

    def manage_unit(self, unit: Unit) -> ParameterGroup | None:
        """Take charge of the parameters of ``unit``, and return their group; None leaves them to the next technique."""

    def finish(self) -> None:
        """Finish building, when all units have their groups; the innermost technique comes first."""

    # In every step of the module: training, validation, test and predict steps.

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Act before a training step.

        Args:
            begins_accumulation: Whether the step is the first of those whose gradients are reduced together. It is the
                same on all ranks, also in a run that was resumed.
        """

    def before_step(self) -> None:
        """Act before a step, or a pipeline's microbatch, before any parameter is gathered."""

    def around_step(self) -> AbstractContextManager[None]:
        """Return a context for a step, in which the outer units are gathered."""
        return nullcontext()

    def wrap_step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return what runs in the place of ``step``, which calls the user's module."""
        return step

    def on_gather(self, group: ParameterGroup, running: Collection[nn.Module]) -> None:
        """Act when the gathered parameters of ``group`` are about to be used.

        Args:
            group: A group that is gathered.
            running: The modules of the group's unit whose forward begins now; empty if none does.
        """

    def on_free(self, group: ParameterGroup) -> None:
        """Act after the forward of a unit's modules, before its parameters may be freed."""

    def around_rerun(self, unit: Unit, block: nn.Module) -> Callable[[], Callable[[], AbstractContextManager[None]]]:
        """Return what is called when a forward of ``block`` begins.

        It returns in its turn a function whose context is entered around that forward, and around each time that
        activation checkpointing runs it again in the backward, where the state of a technique may be another.

        Args:
            unit: A unit of the kind ``block``.
            block: A module of it.
        """
        return lambda: nullcontext

    def finish_output(self, output: Any) -> Any:
        """Return what a step returns, made of what the user's module returned."""
        return output

    def after_step(self, backward_follows: bool) -> None:
        """Act after a step.

        Args:
            backward_follows: Whether the caller runs a backward from what the step returned.
        """

    def after_error(self) -> None:
        """Undo what a step has left that raised an error."""

    # In every backward, and in the optimizer's step.

    def around_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward."""
        return nullcontext()

    def after_backward(self, reduces: bool) -> None:
        """Act after a backward.

        Args:
            reduces: Whether gradients are reduced now, and not only added up (accumulation).
        """

    def gradients_left(self) -> Iterable[str]:
        """Return the names of the parameters that have a gradient which the optimizer would not see."""
        return ()

    def before_optimizer_step(self) -> None:
        """Act before an optimizer step, when all gradients are reduced."""

    def after_optimizer_step(self) -> None:
        """Act after an optimizer step, when no parameter is gathered."""

    # In a pipeline's step: many forwards and backwards, in any order, without a reduction.

    def around_microbatches(self) -> AbstractContextManager[None]:
        """Return a context for the forwards and backwards of microbatches. All units are gathered inside."""
        return nullcontext()

    def reduce_microbatches(self, reduces: bool) -> None:
        """Act when all microbatches have added up their gradients, while the units are gathered.

        Args:
            reduces: Whether gradients are reduced now, and not only added up.
        """

    def after_microbatches(self, reduces: bool) -> None:
        """Act after :meth:`reduce_microbatches`, when the units are free.

        Args:
            reduces: As above.
        """

    # Outside of steps.

    def without_hook_views(self) -> AbstractContextManager[None]:
        """Return a context in which tensors are what they are on this rank, and not what hooks may take them for."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which every rank holds the whole model, given that all groups are gathered."""
        return nullcontext()

    def total_norm(self, gradients: Sequence[Tensor], order: float) -> Tensor | None:
        """Return the norm of the gradients of the whole model; None where that of ``gradients`` is it.

        Args:
            gradients: The gradients of the parameters that this rank has.
            order: The order of the norm: positive, and possibly infinite.
        """

    def agree_on_buffers(self) -> None:
        """Give all ranks the same buffers, given that ranks with the same parameters have the same. A collective."""

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of the module with the tensors in it that this rank writes into a checkpoint.

        Args:
            state: A state dict of the module, or of a copy of it.
        """
        return state

    def others_to_write(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return other entries of a checkpoint with the tensors in them that this rank writes. A collective.

        Args:
            checkpoint: What hooks and callbacks have put into the checkpoint, with the same keys on all ranks.
        """
        return checkpoint

    def add_remote_state(self, state: dict[str, Any]) -> None:
        """Add to a state dict that was read what only other ranks have, on the meta device."""

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with that of parameters which only other ranks have. A collective.

        Args:
            state: The state by the full names of parameters, as :func:`lightning_dist.checkpoint.state.by_name` has it.
                Tensors that other ranks have are added on the meta device.
        """
        return state

    def collect_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return dictionaries of values by parameters' names with those of ranks that have other parameters.

        A collective over these ranks.

        Args:
            parts: This rank's dictionaries, which can be pickled.
        """
        return parts

    def original(self) -> AbstractContextManager[None]:
        """Return a context in which the module has the forwards, attributes and hooks that the user gave it.

        It serves to run the module on fake tensors.
        """
        return nullcontext()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this technique for this rank; tensors, and what torch.load may read."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` returned when the checkpoint was saved."""

    def table_rows(self) -> Rows:
        """Return the rows that the table at the start of a run has about this technique."""
        return ()

    # What a step may change in gathered parameters, or put into the modules in their place.

    def copies(self) -> Iterable[tuple[str, Tensor, nn.Parameter]]:
        """Return the tensors that modules compute with in place of parameters that have gradients.

        Returns:
            The name of each parameter, the tensor, and the parameter, which the optimizer sees or which is such a
            tensor of a technique further outside.
        """
        return ()

    def write_back(self) -> None:
        """Keep what a step has changed in gathered parameters."""

    def take_replaced(self, param: nn.Parameter) -> bool:
        """Write into a gathered parameter what the step has put in its place, and return whether there was anything."""
        return False

    def is_form_of_parameter(self, module: nn.Module, name: str, held: Tensor | None) -> bool:
        """Return whether what ``module`` holds as ``name`` was put there by this technique for its parameter."""
        return False


INSIDE_OUT = frozenset(
    {
        "after_backward",
        "after_error",
        "after_microbatches",
        "after_optimizer_step",
        "after_step",
        "finish",
        "finish_output",
        "on_free",
        "prepare_unit",
        "reduce_microbatches",
        "state_to_write",
        "whole",
        "whole_optimizer_state",
        "wrap_step",
        "write_back",
    }
)
"""The points at which the innermost technique is called first; at all others, the outermost one is."""


def bound(techniques: Sequence[Technique], point: str) -> tuple[Callable[..., Any], ...]:
    """Return the methods named ``point`` of the techniques that override it, in the order in which they are called.

    Args:
        techniques: The techniques, from the outside in.
        point: The name of a method of :class:`Technique`.
    """
    found = [
        getattr(technique, point)
        for technique in techniques
        if getattr(type(technique), point) is not getattr(Technique, point)
    ]
    return tuple(reversed(found) if point in INSIDE_OUT else found)


class Points:
    """Hold, for each method of :class:`Technique`, those of the techniques that override it (see :func:`bound`).

    Args:
        techniques: The techniques, from the outside in.
    """

    def __init__(self, techniques: Sequence[Technique]) -> None:
        for point in vars(Technique):
            if not point.startswith("_") and callable(getattr(Technique, point)):
                vars(self)[point] = bound(techniques, point)

    def __getattr__(self, point: str) -> tuple[Callable[..., Any], ...]:
        raise AttributeError(f"Technique has no method {point!r}.")
