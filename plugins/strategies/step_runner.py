"""Run the steps of the user's module and of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.checkpoint.state import OwnStates
from lightning_dist.mesh.consensus import announce_progress
from lightning_dist.parameters.whole_step import WholeStep
from lightning_dist.plugins import _compat
from lightning_dist.plugins.precision import MeshPrecision
from lightning_dist.plugins.strategies.checkpointing import Checkpoints
from lightning_dist.plugins.strategies.checks import check_optimizers
from lightning_dist.plugins.strategies.host import Host
from lightning_dist.plugins.strategies.memory_report import MemoryReport
from lightning_dist.plugins.strategies.optimizer_steps import OptimizerStep, OptimizerSteps
from lightning_dist.plugins.strategies.shared_batches import SharedBatches
from lightning_dist.plugins.strategies.steps.base import Steps, begins_accumulation
from lightning_dist.plugins.strategies.steps.choice import make_steps
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.plugins.strategies.wrapped_hooks import OUTSIDE_OF_STEPS, WrappedHooks

__all__ = ["OptimizerOwners", "StepRunner"]


def _do_nothing() -> None:
    pass


class OptimizerOwners:
    """Let optimizers step on shards or on whole parameters, and record which rank has which of their states.

    Args:
        where: Where optimizers step: ``"auto"``, ``"shards"``, ``"whole"`` or ``"dtensors"``.
    """

    def __init__(self, where: OptimizerStep) -> None:
        self.where = where
        self._steps: OptimizerSteps | None = None
        self._undo: Callable[[], None] = _do_nothing

    def set_up(self, host: Host) -> None:
        """Check the optimizers, and change how they step. This is a collective over all processes.

        Raises:
            ValueError: If an optimizer holds parameters that are not the module's.
            MisconfigurationException: If an optimizer cannot work with another setting, or with the layout.
        """
        optimizers, arguments, plugin = host.optimizers, host.config.arguments, host.precision_plugin
        check_optimizers(optimizers, host.module, type(host).__name__, host.root_device)
        kind = plugin.master_weights if isinstance(plugin, MeshPrecision) else None
        is_asked = self.where == "whole"
        need_shards = [options.needs_shards(host.root_device, is_asked) for options in arguments.options]
        if kind is not None:
            need_shards.append(f"MeshPrecision(master_weights={kind!r})")
        hindrances = list(filter(None, need_shards))
        self._steps = OptimizerSteps(
            optimizers, host.module, self.where, host.layout, hindrances, sync=arguments["sync"]
        )
        self._undo = host.parallel.prepare_optimizers(optimizers)
        self._module = host.module

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return the rows about optimizers for the table at the start of a run."""
        return [] if self._steps is None else self._steps.rows

    def restore(self) -> None:
        """Give optimizers back what a step has replaced."""
        if self._steps is not None:
            self._steps.restore()

    def release(self) -> None:
        """Undo what :meth:`set_up` has changed; the states stay known, as a checkpoint may still be saved."""
        self._undo()
        self._undo = _do_nothing
        if self._steps is not None:
            self._steps.remove()

    def own_states(self, optimizer: Optimizer) -> OwnStates | None:
        """Return a function that returns which states of an optimizer this rank keeps; None: its shards of all."""
        step = self._whole_step(optimizer)
        return None if step is None else step.own_states

    def with_states_of_owners(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with the states of parameters that only their owners have."""
        step = self._whole_step(optimizer)
        if step is None:
            return state
        return step.state_to_write(state, {param: name for name, param in self._module.named_parameters()})

    def _whole_step(self, optimizer: Optimizer) -> WholeStep | None:
        if self._steps is None:
            return None
        return self._steps.whole(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)


class _TakenOver(Exception):  # noqa: N818 - Nothing has gone wrong.
    """Leave the optimizer's step, because the weights are already those after it."""

    def __init__(self, output: Any) -> None:
        self.output = output


class StepRunner:
    """Run the module's steps, its backward, and the steps of its optimizers. It exists once a strategy is set up.

    Args:
        host: The strategy, whose module is parallel.
        batches: Object that compares the batches of ranks.
        checkpoints: Object that copies tensors in the background while steps run.
        owners: Object by which optimizers step.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
        catch_up: Function that is called after each backward, and returns whether the weights are already those after
            the optimizer's step.
    """

    def __init__(
        self,
        host: Host,
        batches: SharedBatches,
        checkpoints: Checkpoints,
        owners: OptimizerOwners,
        tracing: StepTracing,
        catch_up: Callable[[], bool],
    ) -> None:
        self._host = host
        self._catch_up = catch_up
        self._batches = batches
        self._checkpoints = checkpoints
        self._owners = owners
        self._steps: Steps = make_steps(host.module, host.parallel, host.precision_plugin, tracing)
        self._steps.wait_before_changes(checkpoints.before_update)  # Weights may be copied into a checkpoint.
        agreed = batches.agreed_results
        self._hooks = WrappedHooks(host.module, OUTSIDE_OF_STEPS, self._steps.around_hook, agreed)
        self._hooks.install(host.trainer)
        self._memory = MemoryReport.of(host) if host.trainer.state.fn == TrainerFn.FITTING else None

    def close(self) -> None:
        """Restore the module's own hooks."""
        self._hooks.remove()

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run the module's ``training_step``. This is a collective, like all steps."""
        parallel, is_automatic = self._host.parallel, self._host.module.automatic_optimization
        announce_progress()
        self._checkpoints.before_step()
        if not is_automatic:
            self._checkpoints.before_update()
        self._batches.before_step("training_step", args, kwargs)
        parallel.before_training_step(begins_accumulation(self._host.trainer))
        # A step of manual optimization may clip gradients.
        with nullcontext() if is_automatic else _compat.total_norms(parallel.total_norm):
            return self._report.measured(partial(self._steps.train, args, kwargs))

    @property
    def _report(self) -> MemoryReport:
        if self._memory is None:
            raise RuntimeError("Training steps run in a fit only, and this Trainer evaluates.")
        return self._memory

    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run the step ``name`` without a backward."""
        self._batches.before_step(name, args, kwargs)
        output = self._steps.evaluate(name, args, kwargs)
        return cast(STEP_OUTPUT, self._host.precision_plugin.convert_output(output))

    def backward(self, loss: Tensor, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Run the backward, in automatic and in manual optimization."""
        with self._report.explained():
            return self._steps.backward(loss, optimizer, args, kwargs)

    def step_optimizer(self, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Step an optimizer. Gradients are clipped by the norm of the whole model's gradients.

        Args:
            closure: Function that computes the loss and its gradients.
            step: Function that steps the optimizer, given the closure to call.
        """
        parallel, memory = self._host.parallel, self._report

        def closure_then_wait() -> Any:
            with self._steps.in_closure():
                output = closure()
            self._checkpoints.before_update()
            if self._catch_up():
                raise _TakenOver(output)
            parallel.before_optimizer_step()
            memory.before_optimizer_step()
            return output

        with self._steps.outside_of_hooks():
            if not self._host.module.automatic_optimization:  # The optimizer may ignore the closure.
                parallel.before_optimizer_step()
            try:
                with memory.explained(), _compat.total_norms(parallel.total_norm):
                    output = step(closure_then_wait)
            except _TakenOver as taken_over:
                output = taken_over.output
            finally:
                self._owners.restore()
            parallel.after_optimizer_step()
            memory.after_optimizer_step()
        return output

    @contextmanager
    def before_last_batch(self) -> Generator[None, None, None]:
        """Return a context in which each rank adds up its own gradients, for Lightning's accumulation of gradients."""
        parallel = self._host.parallel
        parallel.set_gradient_sync(self._host.config.arguments.reduces_every_batch)
        try:
            with self._steps.before_last_batch():
                yield
        finally:
            parallel.set_gradient_sync(True)
