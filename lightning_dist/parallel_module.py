"""Run the steps of a module in parallel by calling a list of techniques, none of which is known here by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_dist._compat import around_backwards
from lightning_dist.checkpoint.whole_files import register, whole_state_dicts
from lightning_dist.mesh.consensus import timed_barrier
from lightning_dist.model.initialization import materialize, materialize_attributes
from lightning_dist.model.units import Unit
from lightning_dist.parameters.gradient_observer import GradientObserver
from lightning_dist.parameters.group import ParameterGroup, gather_in_turn
from lightning_dist.parameters.replaced import ReplacedParameters
from lightning_dist.parameters.step_gradients import StepGradients
from lightning_dist.techniques.protocol import Points, Technique
from lightning_dist.techniques.states import TechniqueStates

__all__ = ["NotInStepError", "ParallelModule", "full_parameters", "parallelized", "parallelized_around"]

SomeTechnique = TypeVar("SomeTechnique", bound=Technique)

_modules: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ParallelModule]] = weakref.WeakKeyDictionary()


class NotInStepError(RuntimeError):
    """Report that a module was called outside of a step, where the other ranks may not call it."""


def parallelized(module: nn.Module) -> ParallelModule | None:
    """Return the :class:`ParallelModule` that was made of ``module``; None if there is none."""
    reference = _modules.get(module)
    return reference() if reference is not None else None


def parallelized_around(module: nn.Module) -> ParallelModule | None:
    """Return the :class:`ParallelModule` made of ``module`` or of a module around it; None if there is none."""
    for root, reference in list(_modules.items()):
        if any(part is module for part in root.modules()):
            return reference()
    return None


@contextmanager
def full_parameters(module: nn.Module, timeout_s: float = 60.0) -> Iterator[None]:
    """Hold the whole ``module`` on every rank in this context, so that any rank may call it alone, without gradients.

    Use it to sample from a model, to export it, or to read a weight. Every rank must enter the context. A module that
    is not parallel is left as it is, so that the same code works with any strategy. Do not change parameters inside,
    because some of them are copies and others are not.

    Args:
        module: A LightningModule, during training or after it.
        timeout_s: Seconds to wait for the other ranks to enter the context.

    Raises:
        OtherRankError: If a rank does not enter the context in time.
    """
    parallel = parallelized(module)
    if parallel is None:
        with torch.no_grad():
            yield
        return
    timed_barrier(f"full_parameters({type(module).__name__})", timeout_s)
    with parallel.full_parameters():
        yield


class ParallelModule:
    """Run the steps of a user's module under a list of techniques.

    Creating an instance is a collective over all processes. Units on the meta device are initialised one at a time, so
    that no rank ever holds the whole model.

    Args:
        module: The user's module, which is changed in place. Its weights are equal on all ranks and on the mesh's
            device, or they are on the meta device.
        units: All units of the module, from :func:`lightning_dist.model.units.find_units`; every parameter is in
            exactly one.
        techniques: The techniques, from the outside in (see :mod:`lightning_dist.techniques.protocol`).
        mesh: The mesh over which the batch is split and gradients are reduced.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], techniques: Sequence[Technique], mesh: DeviceMesh
    ) -> None:
        self.module = module
        self.techniques = tuple(techniques)
        self.mesh = mesh
        self._points = Points(techniques)
        for select_units in self._points.select_units:
            units = select_units(units)
        self.units = tuple(units)
        replaced = ReplacedParameters()
        self.groups = self._build(torch.device(mesh.device_type), replaced)
        self._gathered_for_step = [group for group in self.groups if group.is_gathered_for_step]
        self._freed_after_backward = [g for g in self.groups if g.is_gathered_for_step or not g.is_sharded]
        self._root_groups = [g for g in self.groups if g.unit.stays_gathered and not g.unit.has_forward]
        self.stays_gathered = False
        """Whether every rank holds the whole model (see :meth:`stay_gathered`)."""
        self._kept = ExitStack()
        self.runs_microbatches = False
        """Whether a pipeline's microbatches run now (see :meth:`microbatches`)."""
        self._running = 0
        self._in_step = self._in_backward = False
        self.gradients = StepGradients(module, self.groups, self._points.copies)
        self.states = TechniqueStates(module, techniques, self._points)
        self._has_stepped = False
        self._may_run_first = all(technique.runs_before_first_step for technique in techniques)
        needs_gather = any(group.needs_gather for group in self.groups)
        self._is_free_to_call = self._may_run_first and not needs_gather and not self.watches_gathers
        for group in self.groups:
            self._add_hooks(group)
        register(module, [owner for unit in self.units for owner in unit.modules])
        for finish in self._points.finish:
            finish()
        replaced.refuse(module)
        # The hooks of the modules hold this object, so that it lives as long as the module. If no module needs a hook,
        # the caller lets the module hold it: whether a later Trainer finds it must not depend on when a rank's Python
        # collects garbage, because ranks would differ.
        _modules[module] = weakref.ref(self)

    def _build(self, device: torch.device, replaced: ReplacedParameters) -> tuple[ParameterGroup, ...]:
        """Create the parameter group of every unit. This is a collective over all processes."""
        remote = [tensor for tensors in self._points.remote_tensors for tensor in tensors()]
        for attach in self._points.attach:
            attach(self)
        groups: list[ParameterGroup] = []
        for unit in self.units:
            materialize(unit.modules, self.module, device, remote)
            replaced.watch(unit.params)
            for prepare in self._points.prepare_unit:
                prepare(unit)
            group = next(group for manage in self._points.manage_unit if (group := manage(unit)) is not None)
            group.unit = unit
            group.is_gathered_for_step |= unit.stays_gathered
            group.owners = [owner for owner in self.module.modules() if owner in unit.owners]
            groups.append(group)
            unit.params.clear()  # Nothing may keep the whole parameters in memory.
        materialize([self.module], self.module, device, remote)
        materialize_attributes(self.module, device)
        return tuple(groups)

    def get(self, kind: type[SomeTechnique]) -> SomeTechnique | None:
        """Return the technique of the class ``kind``; None if it is not in the list."""
        return next((technique for technique in self.techniques if isinstance(technique, kind)), None)

    def _add_hooks(self, group: ParameterGroup) -> None:
        unit = group.unit
        if not unit.has_forward or self._is_free_to_call:
            return
        for module in unit.modules:
            module.register_forward_pre_hook(partial(self._before_forward, group), prepend=True)
            if unit.kind == "outer":
                continue
            # These two hooks run between FSDP2's own hooks: after the one that gathers, before the one that frees.
            if self._points.on_gather:
                module.register_forward_pre_hook(lambda module, args: self._call_on_gather(group, [module]))
            if self._points.on_free or not group.is_sharded:
                module.register_forward_hook(lambda *args: self._after_forward(group), prepend=True, always_call=True)
        if unit.kind == "outer":
            # The unit's modules may be called without its forward, or after a backward in the step has freed them.
            def gather(module: nn.Module, args: object) -> None:
                if group.is_gathered and group.needs_gather:
                    group.copy_requires_grad()
                    self._call_on_gather(group)
                else:
                    self._check_running(module, args)
                    self.gather(group)

            for owner in group.owners:
                owner.register_forward_pre_hook(gather, prepend=True)

    def _before_forward(self, group: ParameterGroup, module: nn.Module, args: object) -> None:
        self._check_running(module, args)
        # If parameters are sharded, FSDP2's own hook gathers them next, but in inference mode it would create inference
        # tensors, which cannot be trained later.
        if not group.is_sharded or torch.is_inference_mode_enabled():
            group.gather()

    def _after_forward(self, group: ParameterGroup) -> None:
        for on_free in self._points.on_free:
            on_free(group)
        if not self.runs_microbatches:
            group.after_forward()

    def _check_running(self, module: nn.Module, args: object) -> None:
        if self._running:
            if self._in_step:
                self._gather_root_groups()
            return
        if not self._has_stepped and self._may_run_first:
            # Lightning's ModelSummary calls the model on every rank before the first step, if it has an example input.
            timed_barrier("calling a sharded model before its first step")
            return
        raise NotInStepError(
            f"{type(self.module).__name__} is sharded, and {type(module).__name__} was called outside of a training,"
            " validation, test or predict step: the other ranks would have to call it too, or all would hang. Call it"
            " inside `with lightning_dist.full_parameters(module):`, entered on every rank; within it, any rank may"
            " call the model alone."
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Allow all ranks to call the module together in this context, for example to recompute activations."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    # Steps

    def before_training_step(self, begins_accumulation: bool) -> None:
        """Prepare a training step.

        Args:
            begins_accumulation: Whether the step is the first one of an accumulation, whose gradients are reduced
                together. It is the same on all ranks, also in a run that was resumed.
        """
        # A call of the module before the first step, for example on an example input, may have left outer units
        # gathered.
        if any(group.is_gathered for group in self.groups):
            self.free()
        for before_training_step in self._points.before_training_step:
            before_training_step(begins_accumulation)

    def step(self, step: Callable[[], Any], backward_follows: bool) -> Any:
        """Run ``step``, which calls the module, and return what it returns. This is a collective.

        Args:
            step: Function that runs the step, without arguments.
            backward_follows: Whether the caller runs a backward from the returned value; outer units stay gathered
                then.
        """
        self._in_step = self._has_stepped = True
        try:
            with self.running():
                for before_step in self._points.before_step:
                    before_step()
                for group in gather_in_turn(self._gathered_for_step):
                    self._call_on_gather(group)
                with ExitStack() as around:
                    around.enter_context(around_backwards(self._any_backward))
                    around.enter_context(self.gradients.watched(runs_backwards=not backward_follows))
                    for around_step in self._points.around_step:
                        around.enter_context(around_step())
                    self.gradients.show()
                    output = self._wrapped(step)()
                self.write_back()
                for finish_output in self._points.finish_output:
                    output = finish_output(output)
        except BaseException:
            for after_error in self._points.after_error:
                after_error()
            raise
        finally:
            self._in_step = False
        for after_step in self._points.after_step:
            after_step(backward_follows)
        if not backward_follows:
            self.free()
        return output

    def _wrapped(self, step: Callable[[], Any]) -> Callable[[], Any]:
        for wrap_step in self._points.wrap_step:
            step = wrap_step(step)
        return step

    def write_back(self) -> None:
        """Write a step's changes of gathered parameters into the shards. This is a collective if there are any.

        Raises:
            RuntimeError: If ranks have changed a parameter differently.
        """
        for write_back in self._points.write_back:
            write_back()

    @contextmanager
    def between_forward_and_backward(self) -> Iterator[None]:
        """Let hooks that run between a forward and its backward use and change parameters. This is a collective."""
        with ExitStack() as around:
            for around_step in self._points.around_step:
                around.enter_context(around_step())
            around.enter_context(self.gradients.of_parameters())
            yield
        self.write_back()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward in this context, and reduce the gradients at its end unless they are accumulated.

        This is a collective if gradients are reduced. The module may be called inside, as it is when activations are
        recomputed.
        """
        with self._any_backward():
            with ExitStack() as around:
                for around_backward in self._points.around_backward:
                    around.enter_context(around_backward())
                with self.running():
                    yield
            reduces = self.reduces_gradients
            for after_backward in self._points.after_backward:
                after_backward(reduces)
            for group in self._freed_after_backward:
                group.free()

    @contextmanager
    def _any_backward(self) -> Iterator[None]:
        """Run a backward in this context, called by Lightning or by the step itself. This is not a collective."""
        if self._in_backward:  # Backwards nest in manual_backward and in recomputations.
            yield
            return
        self.gradients.before_backward()
        self._in_backward = has_failed = True
        try:
            yield
            has_failed = False
        except BaseException:  # A step may catch the error and continue.
            for after_error in self._points.after_error:
                after_error()
            raise
        finally:
            self._in_backward = False
            self.gradients.after_backward(self.reduces_gradients and not has_failed, self._in_step)

    @property
    def reduces_gradients(self) -> bool:
        """Return whether a backward reduces gradients over the ranks, or each rank adds up its own (accumulation)."""
        return all(group.syncs_gradients for group in self.groups)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Choose whether a backward reduces gradients over the ranks, or each rank adds up its own (accumulation)."""
        for group in self.groups:
            group.set_gradient_sync(enabled)

    def observe_gradients(self, observer: GradientObserver | None) -> None:
        """Let ``observer`` look at this rank's gradients before they are averaged; None: nobody looks any more."""
        for group in self.groups:
            group.observer = observer

    def gradients_left(self) -> list[str]:
        """Return the names of parameters with a gradient that the optimizer would not see."""
        of_techniques = [name for gradients_left in self._points.gradients_left for name in gradients_left()]
        return [*of_techniques, *(name for group in self.groups for name in group.unreduced_names())]

    def prepare_optimizers(self, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
        """Let techniques change how ``optimizers`` step, and return a function that undoes this."""
        undone = [prepare(optimizer) for optimizer in optimizers for prepare in self._points.prepare_optimizer]

        def undo() -> None:
            for undo_one in undone:
                if undo_one is not None:
                    undo_one()

        return undo

    def before_optimizer_step(self) -> None:
        """Check gradients before an optimizer step, and free gathered parameters, which the step makes stale."""
        self.gradients.take_cleared()
        self.free()
        for before_optimizer_step in self._points.before_optimizer_step:
            before_optimizer_step()

    def after_optimizer_step(self) -> None:
        """Free gathered parameters, which the optimizer step has made stale."""
        self.free()
        for after_optimizer_step in self._points.after_optimizer_step:
            after_optimizer_step()
        if self._in_step:
            self._gather_root_groups()
            self.gradients.show()

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Return figures of this rank for the log, from all techniques (see :meth:`Technique.metrics`)."""
        return {name: value for metrics in self._points.metrics for name, value in metrics(num_steps).items()}

    @property
    def lets_replicas_differ(self) -> bool:
        """Return whether weights may differ between replicas until :meth:`synchronize_replicas`."""
        return bool(self._points.synchronize_replicas)

    def synchronize_replicas(self) -> None:
        """Give all replicas the same weights. This is a collective if their weights may differ now."""
        for synchronize_replicas in self._points.synchronize_replicas:
            self.free()
            synchronize_replicas()

    def total_norm(self, gradients: Sequence[Tensor], order: float = 2.0) -> Tensor | None:
        """Return the norm of the whole model's gradients; None if torch's norm of ``gradients`` is that already.

        This is a collective.

        Args:
            gradients: The gradients of the parameters that this rank has.
            order: The order of the norm: positive, and possibly infinite.
        """
        norms = (total_norm(gradients, order) for total_norm in self._points.total_norm)
        return next((norm for norm in norms if norm is not None), None)

    @contextmanager
    def original(self) -> Iterator[None]:
        """Restore the module's original forwards, attributes and hooks in this context, to run it on fake tensors."""
        with ExitStack() as stack:
            for original in self._points.original:
                stack.enter_context(original())
            yield

    # Microbatches

    @contextmanager
    def microbatches(self, with_backward: bool) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        """Run the forwards and backwards of a pipeline's microbatches, in any order, in this context.

        This is a collective over the mesh. Units stay gathered, and each rank adds up its own gradients until
        :meth:`after_microbatches`. Changes of parameters by microbatches are kept only if :meth:`write_back` is called
        inside.

        Args:
            with_backward: Whether there are backwards; if not, units are freed at the end.

        Yields:
            A function that calls the function that it is given, the step of one microbatch on one stage, under all
            techniques, and returns its output.
        """

        def run(step: Callable[[], Any]) -> Any:
            for before_step in self._points.before_step:
                before_step()
            output = self._wrapped(step)()
            for finish_output in self._points.finish_output:
                output = finish_output(output)
            return output

        self._in_step = self._has_stepped = self.runs_microbatches = True
        try:
            with self.running(), ExitStack() as around:
                for around_microbatches in self._points.around_microbatches:
                    around.enter_context(around_microbatches())
                self.gather_all()
                yield run
        except BaseException:
            for after_error in self._points.after_error:
                after_error()
            raise
        finally:
            self._in_step = self.runs_microbatches = False
        if not with_backward:
            self.free()

    def after_microbatches(self) -> None:
        """Reduce the gradients of microbatches unless they are accumulated, and free the units.

        This is a collective if gradients are reduced.
        """
        reduces = self.reduces_gradients
        self.gradients.has_unreduced = not reduces
        for reduce_microbatches in self._points.reduce_microbatches:
            reduce_microbatches(reduces)
        self.free()
        for after_microbatches in self._points.after_microbatches:
            after_microbatches(reduces)

    # Gathered parameters

    @property
    def watches_gathers(self) -> bool:
        """Return whether any technique acts when a unit's parameters are gathered or freed."""
        return bool(self._points.on_gather or self._points.on_free)

    def gather(self, group: ParameterGroup) -> None:
        """Gather the parameters of ``group``. This is a collective over its mesh unless they are gathered already."""
        group.gather()
        self._call_on_gather(group)

    def gather_all(self) -> None:
        """Gather the parameters of all units. This is a collective over the mesh."""
        for group in gather_in_turn(self.groups):
            self._call_on_gather(group)

    def _call_on_gather(self, group: ParameterGroup, running: Collection[nn.Module] = ()) -> None:
        for on_gather in self._points.on_gather:
            on_gather(group, running)

    def _gather_root_groups(self) -> None:
        # A step that runs a backward itself continues afterwards, and may read the root module's own parameters, for
        # which there is no hook. They are therefore gathered again after an optimizer step, and when a unit runs.
        for group in self._root_groups:
            self.gather(group)

    def free(self) -> None:
        """Put the parameters that optimizers, callbacks and checkpoints read and write back into the module."""
        if self.stays_gathered:
            return
        for group in self.groups:
            group.free()

    @property
    def holds_whole_model(self) -> bool:
        """Return whether no parameter is sharded, so that gathering them is not a collective."""
        return not any(group.is_sharded for group in self.groups)

    def stay_gathered(self) -> None:
        """Gather the whole model on every rank, so that ranks may run unequal numbers of steps without a backward.

        It stays gathered until :meth:`stop_staying_gathered`. This is a collective.
        """
        with self.running():
            self.gather_all()
        for group in self.groups:
            self._kept.enter_context(group.kept_after_forward())
        for while_gathered in self._points.while_gathered:
            self._kept.enter_context(while_gathered())
        self.stays_gathered = True

    def stop_staying_gathered(self) -> None:
        """Undo :meth:`stay_gathered`, if it was called."""
        if self.stays_gathered:
            self._kept.close()
            self.stays_gathered = False
            self.free()

    @contextmanager
    def around_hook(self, what: str) -> Iterator[None]:
        """Run a hook of the user, which runs outside of steps, in this context.

        Args:
            what: Name of the hook with that of its owner's class, such as ``Model.on_train_batch_end``.
        """
        with ExitStack() as stack:
            for around_hook in self._points.around_hook:
                stack.enter_context(around_hook(what))
            yield

    @contextmanager
    def without_hook_views(self) -> Iterator[None]:
        """Show each rank its own tensors in this context, and not the whole tensors that the user's hooks see."""
        with ExitStack() as stack:
            for without_hook_views in self._points.without_hook_views:
                stack.enter_context(without_hook_views())
            yield

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Hold the whole model on every rank in this context, without gradients. All ranks must enter the context."""
        with self.without_hook_views(), ExitStack() as kept, self.running(), torch.no_grad():
            for group in self.groups:
                kept.enter_context(group.in_full_precision())
                kept.enter_context(group.kept_after_forward())
            for group in self.groups:
                group.gather()
            try:
                with ExitStack() as stack:
                    for whole in self._points.whole:
                        stack.enter_context(whole())
                    stack.enter_context(whole_state_dicts(self.module, self.groups))
                    for group in self.groups:
                        stack.enter_context(group.held())
                    yield
            finally:
                self.free()
