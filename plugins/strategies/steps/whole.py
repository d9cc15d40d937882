"""Run steps on the whole module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.parallel_module import ParallelModule
from lightning_dist.plugins.strategies.gradients import are_free_before_forward, free_gradients
from lightning_dist.plugins.strategies.steps.base import Steps, begins_accumulation
from lightning_dist.plugins.strategies.steps.tracing import StepTracing

__all__ = ["WholeSteps"]


class WholeSteps(Steps):
    """Run steps as forwards of the whole module, each followed by the backward that Lightning asks for."""

    def __init__(
        self, module: LightningModule, parallel: ParallelModule, precision: Precision, tracing: StepTracing
    ) -> None:
        super().__init__(module, parallel, precision, tracing)
        self._frees_gradients_first: bool | None = None

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run ``training_step``. This is a collective."""
        automatic = self._module.automatic_optimization
        if self._frees_gradients_first is None:
            self._frees_gradients_first = are_free_before_forward(self._module, self._module.trainer)
        if self._frees_gradients_first:
            free_gradients(self._module.trainer)
        if automatic and begins_accumulation(self._module.trainer):
            self._parallel.gradients.drop_unreduced()  # A stopped or failed run may have left some.
        with self._context("training_step"):
            output = self._parallel.step(partial(self._module.training_step, *args, **kwargs), automatic)
        if automatic:
            steps_in_backward = any(group.steps_in_backward for group in self._parallel.groups)
            self._weights.read(output, self._module.device, steps_in_backward)
        return output

    def backward(self, loss: Tensor, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Run the backward in automatic or manual optimization. This is a collective if gradients are reduced."""
        loss = self._precision.pre_backward(self._weights.scale(loss), self._module)
        with self._parallel.backward():
            self._precision.backward(loss, self._module, optimizer, *args, **kwargs)
        # All gradients are reduced before on_after_backward, which Lightning's own method calls.
        self._normalize_gradients()
        return self._precision.post_backward(loss, self._module)

    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run a step without a backward. This is a collective if parameters are sharded."""
        with self._context(name):
            return self._parallel.step(partial(getattr(self._module, name), *args, **kwargs), backward_follows=False)

    def around_hook(self, name: str) -> AbstractContextManager[None]:
        """Let a hook use and change parameters as in one process, even where torch does not support this for shards."""
        # Between a forward and its backward some parameters are gathered and others sharded.
        if name.endswith((".on_before_zero_grad", ".on_before_backward")):
            return self._before_backward(name)
        if name.endswith(".optimizer_zero_grad"):
            return self._parallel.around_hook(name)
        return self._outside_of_steps(name)

    @contextmanager
    def _before_backward(self, name: str) -> Iterator[None]:
        with (
            self._shards.hook_context(name),
            self._parallel.between_forward_and_backward(),
            self._parallel.around_hook(name),
        ):
            yield

    @contextmanager
    def _outside_of_steps(self, name: str) -> Iterator[None]:
        with (
            self._shards.hook_context(name),
            self._parallel.gradients.with_unreduced_cleared(),
            self._parallel.around_hook(name),
        ):
            yield
