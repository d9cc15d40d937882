"""Define the methods by which a technique may change how a module is built and run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.model.units import Unit
from lightning_dist.parameters.group import ParameterGroup

__all__ = ["Parallel", "Rows", "SomeTechnique", "Technique"]

SomeTechnique = TypeVar("SomeTechnique", bound="Technique")

Rows = Iterable[tuple[str, str]]
"""Rows of the table at the start of a run: a label, which is empty if the row continues the last one, and a text."""


class Parallel(Protocol):
    """Describe what a technique may use of its :class:`~lightning_dist.parallel_module.ParallelModule`."""

    module: nn.Module
    """The user's module."""

    units: tuple[Unit, ...]
    """The units of which this rank has parameters or shards."""

    groups: tuple[ParameterGroup, ...]
    """The group of each unit; the groups exist when :meth:`Technique.finish` is called."""

    techniques: tuple[Technique, ...]
    """All techniques, from the outside in."""

    stays_gathered: bool
    """Whether every rank holds the whole model, so that nothing is gathered or freed."""

    runs_microbatches: bool
    """Whether a pipeline's microbatches run now."""

    @property
    def reduces_gradients(self) -> bool:
        """Return whether a backward reduces gradients over the ranks, or each rank adds up its own (accumulation)."""

    def get(self, kind: type[SomeTechnique]) -> SomeTechnique | None:
        """Return the technique of the class ``kind``; None if it is not in the list."""

    def gradients_left(self) -> list[str]:
        """Return the names of parameters with a gradient that the optimizer would not see."""


class Technique:
    """Change how a module runs. The methods here do nothing; a technique overrides those that it needs."""

    runs_before_first_step: ClassVar[bool] = True
    """Whether all ranks may call the module before its first step, as Lightning's ModelSummary does."""

    # The following methods are called once while the module is built, in this order.

    def select_units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return the units that are built, of the ``units`` of the whole module.

        A technique may leave out those of which this rank has neither parameters nor shards, and merge others.
        """
        return units

    def attach(self, parallel: Parallel) -> None:
        """Keep references to those parts of the module that the technique needs later.

        Args:
            parallel: The object with the module, its units and all techniques; the parameters have no groups yet.
        """

    def prepare_unit(self, unit: Unit) -> None:
        """Change a unit before its parameters get their group, by replacing parameters or forwards of its modules.

        Args:
            unit: A unit whose tensors have values. If parameters are replaced, ``unit.params`` must be updated.
        """

    def manage_unit(self, unit: Unit) -> ParameterGroup | None:
        """Return a group that manages the parameters of ``unit``; None leaves them to the next technique."""

    def finish(self) -> None:
        """Finish building after all units have got their groups."""

    # The following methods are called in every training, validation, test and predict step.

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Act before a training step.

        Args:
            begins_accumulation: Whether the step is the first one of an accumulation, whose gradients are reduced
                together. It is the same on all ranks, also in a run that was resumed.
        """

    def before_step(self) -> None:
        """Act before a step, or a pipeline's microbatch, before any parameter is gathered."""

    def around_step(self) -> AbstractContextManager[None]:
        """Return a context for a step, in which the outer units are gathered."""
        return nullcontext()

    def wrap_step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that runs instead of ``step``, which calls the user's module."""
        return step

    def on_gather(self, group: ParameterGroup, running: Collection[nn.Module]) -> None:
        """Act before the gathered parameters of ``group`` are used.

        Args:
            group: A gathered parameter group.
            running: The modules of the group's unit whose forward begins now; empty if no forward begins.
        """

    def on_free(self, group: ParameterGroup) -> None:
        """Act after the forward of a unit's modules, before its parameters may be freed."""

    def around_rerun(self, unit: Unit, block: nn.Module) -> Callable[[], Callable[[], AbstractContextManager[None]]]:
        """Return a function that activation checkpointing calls when a forward of ``block`` begins.

        That function returns another one, whose context is entered around this forward and around each rerun of it in
        the backward. It serves to give a rerun the state that the technique had in the forward.

        Args:
            unit: A unit of the kind ``block``.
            block: A module of this unit.
        """
        return lambda: nullcontext

    def finish_output(self, output: Any) -> Any:
        """Return the output of a step, given the output of the user's module or of an inner technique."""
        return output

    def after_step(self, backward_follows: bool) -> None:
        """Act after a step.

        Args:
            backward_follows: Whether the caller runs a backward from what the step returned.
        """

    def after_error(self) -> None:
        """Reset the state that a failed step has left behind."""

    # The following methods are called in every backward, and in the optimizer's step.

    def around_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward."""
        return nullcontext()

    def after_backward(self, reduces: bool) -> None:
        """Act after a backward.

        Args:
            reduces: Whether gradients are reduced now, and not accumulated further.
        """

    def prepare_optimizer(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """Change how ``optimizer`` steps, when it has been created and before its state is loaded.

        Returns:
            A function that undoes the change at the end of a run; None: nothing was changed.
        """

    def before_optimizer_step(self) -> None:
        """Act before an optimizer step, when all gradients are reduced."""

    def after_optimizer_step(self) -> None:
        """Act after an optimizer step, when no parameter is gathered."""

    def synchronize_replicas(self) -> None:
        """Give all replicas the same weights, before an evaluation or a checkpoint, when no parameter is gathered.

        This is a collective.
        """

    # The following methods are called in a pipeline's step, which runs many forwards and backwards in any order, and
    # reduces gradients only at its end.

    def around_microbatches(self) -> AbstractContextManager[None]:
        """Return a context for the forwards and backwards of microbatches. All units are gathered inside."""
        return nullcontext()

    def reduce_microbatches(self, reduces: bool) -> None:
        """Act after all microbatches have added up their gradients, while the units are still gathered.

        Args:
            reduces: Whether gradients are reduced now, and not accumulated further.
        """

    def after_microbatches(self, reduces: bool) -> None:
        """Act after :meth:`reduce_microbatches`, when the units have been freed.

        Args:
            reduces: The same as for :meth:`reduce_microbatches`.
        """

    # The following methods are called outside of steps.

    def around_hook(self, what: str) -> AbstractContextManager[None]:
        """Return a context for a hook of the user that runs outside of steps.

        Args:
            what: Name of the hook with that of its owner's class, such as ``Model.on_train_batch_end``.
        """
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which every rank holds the whole model, given that all groups are gathered."""
        return nullcontext()

    def while_gathered(self) -> AbstractContextManager[None]:
        """Return a context in which ranks may run unequal numbers of steps, given that all groups stay gathered.

        No step in the context may be a collective. Entering the context may be one.
        """
        return nullcontext()

    def total_norm(self, gradients: Sequence[Tensor], order: float) -> Tensor | None:
        """Return the norm of the gradients of the whole model; None if torch's norm of ``gradients`` is that already.

        Args:
            gradients: The gradients of the parameters that this rank has.
            order: The order of the norm: positive, and possibly infinite.
        """

    def table_rows(self) -> Rows:
        """Return the rows about this technique for the table at the start of a run."""
        return ()

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return figures of this rank for the log, by names that are the same on all ranks.

        Args:
            num_steps: Number of optimizer steps since the last call, to which the figures belong.
        """
        return {}

    # The following methods are about a step's changes of gathered parameters, and about tensors that it puts in their
    # place.
