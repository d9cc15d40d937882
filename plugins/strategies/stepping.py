"""Define a strategy that runs the steps of the user's module and of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.checkpoint.state import OwnStates
from lightning_dist.mesh.consensus import announce_progress
from lightning_dist.parameters.whole_step import WholeStep
from lightning_dist.plugins import _compat
from lightning_dist.plugins.precision import MeshPrecision
from lightning_dist.plugins.strategies.checks import check_optimizers, explaining_optimizer_errors
from lightning_dist.plugins.strategies.memory_report import MemoryReport
from lightning_dist.plugins.strategies.optimizer_steps import OptimizerStep, OptimizerSteps, check_optimizer_step
from lightning_dist.plugins.strategies.parallelizing import ParallelizingStrategy
from lightning_dist.plugins.strategies.steps.base import Steps, begins_accumulation

__all__ = ["SteppingStrategy"]


def _do_nothing() -> None:
    pass


class SteppingStrategy(ParallelizingStrategy):
    """Run the module's steps, its backward, and the steps of its optimizers on shards.

    Args:
        args: Arguments of :class:`~lightning_dist.plugins.strategies.parallelizing.ParallelizingStrategy`.
        optimizer_step: Where optimizers step: ``"auto"``, ``"shards"``, ``"whole"`` or ``"dtensors"``.
        kwargs: Keyword arguments of the same class.

    Raises:
        ValueError: If ``optimizer_step`` has none of its values.
    """

    def __init__(self, *args: Any, optimizer_step: OptimizerStep = "auto", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._where_optimizers_step = check_optimizer_step(optimizer_step)
        self._steps: Steps | None = None
        self._memory: MemoryReport | None = None
        self._optimizer_steps: OptimizerSteps | None = None
        self._undo_optimizers: Callable[[], None] = _do_nothing

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers of the sharded parameters.

        Raises:
            ValueError: If an optimizer holds parameters that are not the module's.
            MisconfigurationException: If an optimizer cannot work with another setting, or with the layout.
        """
        with explaining_optimizer_errors(type(self).__name__):
            super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        check_optimizers(self.optimizers, self.lightning_module, type(self).__name__, self.root_device)
        plugin, arguments = self.precision_plugin, self._config.arguments
        kind = plugin.master_weights if isinstance(plugin, MeshPrecision) else None
        is_asked = self._where_optimizers_step == "whole"
        need_shards = [options.needs_shards(self.root_device, is_asked) for options in arguments.options]
        if kind is not None:
            need_shards.append(f"MeshPrecision(master_weights={kind!r})")
        self._optimizer_steps = OptimizerSteps(
            self.optimizers,
            self.lightning_module,
            self._where_optimizers_step,
            self.layout,
            list(filter(None, need_shards)),
            arguments["sync"],
        )
        self._undo_optimizers = self.parallel.prepare_optimizers(self.optimizers)

    @property
    def optimizer_rows(self) -> list[tuple[str, str]]:
        """Return the rows about optimizers for the table at the start of a run."""
        return [] if self._optimizer_steps is None else self._optimizer_steps.rows

    @override
    def _with_states_of_owners(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        step = self._whole_step(optimizer)
        if step is None:
            return state
        assert self.lightning_module is not None
        return step.state_to_write(state, {param: name for name, param in self.lightning_module.named_parameters()})

    @override
    def _own_states(self, optimizer: Optimizer) -> OwnStates | None:
        step = self._whole_step(optimizer)
        return None if step is None else step.own_states

    def _whole_step(self, optimizer: Optimizer) -> WholeStep | None:
        if self._optimizer_steps is None:
            return None
        return self._optimizer_steps.whole(
            optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        )

    @property
    def steps(self) -> Steps:
        """Return the object that runs the module's steps; it exists once the strategy is set up."""
        assert self._steps is not None
        return self._steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``training_step``. This is a collective, like all steps."""
        assert self.lightning_module is not None
        announce_progress()
        self._checkpoints.before_step()
        if not self.lightning_module.automatic_optimization:
            self._checkpoints.before_update()
        self._check_batch("training_step", args, kwargs)
        self.parallel.before_training_step(begins_accumulation(self._trainer))
        assert self._memory is not None
        # A step of manual optimization may clip gradients.
        clips = not self.lightning_module.automatic_optimization
        with _compat.total_norms(self.parallel.total_norm) if clips else nullcontext():
            return self._memory.training_step(partial(self.steps.train, args, kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``validation_step``."""
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``test_step``."""
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's ``predict_step``."""
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        self._check_batch(name, args, kwargs)
        return cast(STEP_OUTPUT, self.precision_plugin.convert_output(self.steps.evaluate(name, args, kwargs)))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, in automatic and in manual optimization."""
        assert self._memory is not None
        with self._memory.explained():
            return self.steps.backward(closure_loss, optimizer, args, kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer``. Gradients are clipped by the norm of the whole model's gradients."""

        def closure_then_wait() -> Any:
            with self.steps.in_closure():
                output = closure()
            self._checkpoints.before_update()
            self.parallel.before_optimizer_step()
            memory.before_optimizer_step()
            return output

        assert self.lightning_module is not None
        assert self._memory is not None
        memory = self._memory
        with self.steps.outside_of_hooks():
            if not self.lightning_module.automatic_optimization:  # The optimizer may ignore the closure.
                self.parallel.before_optimizer_step()
            try:
                with memory.explained(), _compat.total_norms(self.parallel.total_norm):
                    output = super().optimizer_step(optimizer, closure_then_wait, model, **kwargs)
            finally:
                if self._optimizer_steps is not None:
                    self._optimizer_steps.restore()
            self.parallel.after_optimizer_step()
            memory.after_optimizer_step()
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Return a context in which each rank adds up its own gradients, for Lightning's accumulation of gradients."""
        self.parallel.set_gradient_sync(self._config.arguments.reduces_every_batch)
        try:
            with self.steps.before_last_batch():
                yield
        finally:
            self.parallel.set_gradient_sync(True)

    def _release_optimizers(self) -> None:
        """Undo what :meth:`setup_optimizers` has changed in the optimizers."""
        self._undo_optimizers()
        self._undo_optimizers = _do_nothing
        if self._optimizer_steps is not None:
            self._optimizer_steps.remove()  # The object stays, as a checkpoint may still be saved.
