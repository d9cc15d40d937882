"""Define the protocol of techniques, which change how a module is built and run.

A technique (sharding, tensor parallelism, pipeline stages, activation checkpointing, ...) is one object in the list
that :func:`lightning_dist.parallelize.parallelize` builds. :class:`~lightning_dist.parallel_module.ParallelModule`
calls the methods of the techniques below, and knows none of the techniques by name. A new technique needs one file and
one entry in the list.

The contract:

- **Order.** The list goes from the outside in, like nested ``with`` statements. Methods that act *before* an event
  (``before_step``, entering a context) are called in the order of the list, and methods that act *after* it
  (``finish_output``, ``after_backward``, leaving a context) in the reverse order. Units are prepared from the inside
  out (:meth:`Technique.prepare_unit`), so that an outer technique sees a unit as the inner ones have changed it.
- **Parameter groups.** The parameters of each unit are managed by exactly one group, which is the first one that a
  technique returns from :meth:`Technique.manage_unit`. A step sees the parameters gathered; optimizers, callbacks and
  checkpoints see them as they are after the group has freed them.
- **Gathered parameters.** :meth:`Technique.on_gather` is called when the gathered parameters of a unit are about to be
  used, also if they have been gathered before: after FSDP2's pre-forward hook, which gathers them, and before the
  forward. :meth:`Technique.on_free` is called after the forward, before FSDP2's post-forward hook frees them.
- **Cost.** The methods that a technique overrides are looked up once, when the module is built (see :func:`bound`). A
  method that it does not override is never called.
- **Errors.** A technique that raises an error on one rank must raise one on all ranks, or say in its docstring in which
  collective the other ranks would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.model.units import Unit
from lightning_dist.parameters.gradient_reducer import GradientReducer
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.parameters.shard_memory import ShardMemory

__all__ = ["Parallel", "Points", "Rows", "Technique", "bound", "find_gradient_reducer", "find_shard_memory"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

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

    def remote_tensors(self) -> Collection[Tensor]:
        """Return the parameters and buffers that only other ranks have; they stay on the meta device on this rank."""
        return ()

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

    def shard_dim(self, param: nn.Parameter) -> int | None:
        """Return the dimension along which ``param`` must be sharded; None leaves it to the sharding technique."""

    def param_dtype(self, owner: nn.Module) -> torch.dtype | None:
        """Return the dtype in which ``owner`` computes with its own parameters; None leaves it to the sharding."""

    def gradient_reducer(self) -> GradientReducer | None:
        """Return what averages gradients over ``dp_replicate`` in place of an all-reduce; None: the next technique."""

    def shard_memory(self) -> ShardMemory | None:
        """Return where shards of parameters are kept between their uses; None: on the device, or as others say."""

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

    def gradients_left(self) -> Iterable[str]:
        """Return the names of the parameters with a gradient that the optimizer would not see."""
        return ()

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

    def without_hook_views(self) -> AbstractContextManager[None]:
        """Return a context in which code sees each rank's own tensors, and not the whole tensors that hooks see."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which every rank holds the whole model, given that all groups are gathered."""
        return nullcontext()

    def splits_tokens_of(self, module: nn.Module) -> bool:
        """Return whether the ranks of ``tp``, which have the same batch, now run ``module`` on different tokens."""
        return False

    def may_split_tokens_of(self, module: nn.Module) -> bool:
        """Return whether :meth:`splits_tokens_of` may be true in some step, on this rank or on another one."""
        return False

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

    def agree_on_buffers(self) -> None:
        """Give all ranks the same buffers, if so far only ranks with the same parameters have the same buffers.

        This is a collective.
        """

    def state_to_write(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` in the form in which this rank writes it into a checkpoint.

        Tensors that other ranks write become meta tensors; those that several ranks write in parts become DTensors.

        Args:
            state: A state dict of the module, or of a copy of it.
        """
        return state

    def hook_state_to_write(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return other entries of a checkpoint in the form in which this rank writes them. This is a collective.

        Args:
            checkpoint: Entries that hooks and callbacks have added to the checkpoint, with the same keys on all ranks.
        """
        return checkpoint

    def add_remote_state(self, state: dict[str, Any]) -> None:
        """Add the tensors that only other ranks have, on the meta device, to a state dict that was read."""

    def whole_optimizer_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state as :meth:`state_to_write` does, with that of other ranks. This is a collective.

        Args:
            state: The state by the full names of parameters, from :func:`lightning_dist.checkpoint.state.by_name`.
                Tensors that other ranks have are added on the meta device.
        """
        return state

    def collect_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return this rank's dictionaries of values by parameter name, and those of ranks that have other parameters.

        This is a collective over these ranks.

        Args:
            parts: Dictionaries of this rank, which must be picklable.
        """
        return parts

    def original(self) -> AbstractContextManager[None]:
        """Return a context in which the module has its original forwards, attributes and hooks.

        It is used to run the module on fake tensors.
        """
        return nullcontext()

    def state(self) -> dict[str, Any]:
        """Return the technique's state for a checkpoint. This is a collective.

        The state must not change while the checkpoint is written in the background.

        Returns:
            Nested dictionaries with the same keys on all ranks, of values that ``torch.load`` accepts. Tensors that
            differ between ranks are DTensors, those that only other ranks have are on the meta device, and other values
            are the same on all ranks.
        """
        return {}

    def state_template(self, path: Sequence[Any], shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return an empty tensor of any placement, to read a tensor of a saved :meth:`state` into; None leaves it out.

        Args:
            path: Keys that lead to the tensor in the state.
            shape: Shape of the whole tensor.
            dtype: Dtype of the tensor.
        """
        return torch.empty(shape, dtype=dtype)

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state` returned when a run with any layout saved the checkpoint."""

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

    def copies(self) -> Iterable[tuple[str, Tensor, nn.Parameter]]:
        """Return the tensors that modules compute with in place of parameters that have gradients.

        Returns:
            For each parameter its name, the tensor that modules compute with, and the parameter. The latter is the one
            that the optimizer sees, or is in turn such a tensor of an outer technique.
        """
        return ()

    def write_back(self) -> None:
        """Write a step's changes of gathered parameters into the parameters that the optimizer sees."""

    def write_back_data(self, param: nn.Parameter) -> bool:
        """Copy a tensor that the step has put in the place of ``param`` into it, and return whether there was one."""
        return False

    def is_form_of_parameter(self, module: nn.Module, name: str, held: Tensor | None) -> bool:
        """Return whether ``held``, which ``module`` holds as ``name``, was put there by this technique."""
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
"""Names of the methods that are called for the innermost technique first; others are called outermost first."""


def bound(
    techniques: Sequence[Technique], point: Callable[Concatenate[Technique, _Arguments], _Result]
) -> tuple[Callable[_Arguments, _Result], ...]:
    """Return the method ``point`` of each technique that overrides it, in the order in which they are called.

    Args:
        techniques: The techniques, from the outside in.
        point: A method of :class:`Technique`, such as ``Technique.before_step``.
    """
    name = point.__name__
    found = [getattr(technique, name) for technique in techniques if getattr(type(technique), name) is not point]
    return tuple(reversed(found) if name in INSIDE_OUT else found)


def find_gradient_reducer(techniques: Sequence[Technique]) -> GradientReducer | None:
    """Return what averages gradients over ``dp_replicate`` in place of an all-reduce; None: there is nothing.

    Args:
        techniques: The techniques, from the outside in.
    """
    reducers = (reducer() for reducer in bound(techniques, Technique.gradient_reducer))
    return next((reducer for reducer in reducers if reducer is not None), None)


def find_shard_memory(techniques: Sequence[Technique]) -> ShardMemory | None:
    """Return where shards of parameters are kept between their uses; None: on the device.

    Args:
        techniques: The techniques, from the outside in.
    """
    memories = (shard_memory() for shard_memory in bound(techniques, Technique.shard_memory))
    return next((memory for memory in memories if memory is not None), None)


class Points:
    """Hold, for each method of :class:`Technique`, the overriding methods of all techniques (see :func:`bound`).

    Args:
        techniques: The techniques, from the outside in.
    """

    def __init__(self, techniques: Sequence[Technique]) -> None:
        self.select_units = bound(techniques, Technique.select_units)
        self.remote_tensors = bound(techniques, Technique.remote_tensors)
        self.attach = bound(techniques, Technique.attach)
        self.prepare_unit = bound(techniques, Technique.prepare_unit)
        self.shard_dim = bound(techniques, Technique.shard_dim)
        self.param_dtype = bound(techniques, Technique.param_dtype)
        self.gradient_reducer = bound(techniques, Technique.gradient_reducer)
        self.shard_memory = bound(techniques, Technique.shard_memory)
        self.manage_unit = bound(techniques, Technique.manage_unit)
        self.finish = bound(techniques, Technique.finish)
        self.before_training_step = bound(techniques, Technique.before_training_step)
        self.before_step = bound(techniques, Technique.before_step)
        self.around_step = bound(techniques, Technique.around_step)
        self.wrap_step = bound(techniques, Technique.wrap_step)
        self.on_gather = bound(techniques, Technique.on_gather)
        self.on_free = bound(techniques, Technique.on_free)
        self.around_rerun = bound(techniques, Technique.around_rerun)
        self.finish_output = bound(techniques, Technique.finish_output)
        self.after_step = bound(techniques, Technique.after_step)
        self.after_error = bound(techniques, Technique.after_error)
        self.around_backward = bound(techniques, Technique.around_backward)
        self.after_backward = bound(techniques, Technique.after_backward)
        self.gradients_left = bound(techniques, Technique.gradients_left)
        self.prepare_optimizer = bound(techniques, Technique.prepare_optimizer)
        self.before_optimizer_step = bound(techniques, Technique.before_optimizer_step)
        self.after_optimizer_step = bound(techniques, Technique.after_optimizer_step)
        self.synchronize_replicas = bound(techniques, Technique.synchronize_replicas)
        self.around_microbatches = bound(techniques, Technique.around_microbatches)
        self.reduce_microbatches = bound(techniques, Technique.reduce_microbatches)
        self.after_microbatches = bound(techniques, Technique.after_microbatches)
        self.around_hook = bound(techniques, Technique.around_hook)
        self.without_hook_views = bound(techniques, Technique.without_hook_views)
        self.whole = bound(techniques, Technique.whole)
        self.splits_tokens_of = bound(techniques, Technique.splits_tokens_of)
        self.may_split_tokens_of = bound(techniques, Technique.may_split_tokens_of)
        self.while_gathered = bound(techniques, Technique.while_gathered)
        self.total_norm = bound(techniques, Technique.total_norm)
        self.agree_on_buffers = bound(techniques, Technique.agree_on_buffers)
        self.state_to_write = bound(techniques, Technique.state_to_write)
        self.hook_state_to_write = bound(techniques, Technique.hook_state_to_write)
        self.add_remote_state = bound(techniques, Technique.add_remote_state)
        self.whole_optimizer_state = bound(techniques, Technique.whole_optimizer_state)
        self.collect_parts = bound(techniques, Technique.collect_parts)
        self.original = bound(techniques, Technique.original)
        self.state = bound(techniques, Technique.state)
        self.state_template = bound(techniques, Technique.state_template)
        self.load_state = bound(techniques, Technique.load_state)
        self.table_rows = bound(techniques, Technique.table_rows)
        self.metrics = bound(techniques, Technique.metrics)
        self.copies = bound(techniques, Technique.copies)
        self.write_back = bound(techniques, Technique.write_back)
        self.write_back_data = bound(techniques, Technique.write_back_data)
        self.is_form_of_parameter = bound(techniques, Technique.is_form_of_parameter)
