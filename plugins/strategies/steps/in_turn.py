"""Run the steps of manual optimization under a pipeline, whose stages work in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.parallel_module import ParallelModule
from lightning_dist.plugins.strategies.steps.pipelined import PipelinedSteps, logging_whole
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.techniques.pipeline import Pipeline
from lightning_dist.tracing.step_graph import checkpointing_without_reentry

__all__ = ["StepsInTurn"]


class StepsInTurn(PipelinedSteps):
    """Run each step on every rank of the pipeline, on the whole batch, as one process runs it.

    Args:
        module: The user's module, cut into stages, which uses manual optimization.
        parallel: The engine's object for ``module``, which gathers its parameters and reduces its gradients.
        precision: Lightning's precision plugin, in whose contexts steps run and which scales losses.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
    """

    def __init__(
        self, module: LightningModule, parallel: ParallelModule, precision: Precision, tracing: StepTracing
    ) -> None:
        super().__init__(module, parallel, precision, tracing)
        self._in_turn = self._pipeline.stages_in_turn

    @classmethod
    @override
    def can_run(cls, parallel: ParallelModule) -> bool:
        """Return whether the module is cut into stages that work in turn."""
        pipeline = parallel.get(Pipeline)
        return pipeline is not None and pipeline.in_turn is not None

    @override
    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run ``training_step``, which runs its own backwards, and return its output. This is a collective."""
        return self._run_in_turn("training_step", args, kwargs)

    @override
    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run a step without a backward, and return its output. This is a collective."""
        return self._run_in_turn(name, args, kwargs)

    def _run_in_turn(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        def step() -> Any:
            with (
                self._in_turn.step(name),
                logging_whole(self._module, self._pipeline.all_stages),
                checkpointing_without_reentry(),
            ):
                return getattr(self._module, name)(*args, **kwargs)

        # The optimizers hold the parameters as they are before the step gathers them.
        self._pipeline.all_stages.mark(self._module)
        with self._metrics.in_step(), self._context(name):
            return cast(STEP_OUTPUT, self._parallel.step(step, backward_follows=False))

    @override
    @contextmanager
    def outside_of_hooks(self) -> Iterator[None]:
        """Return a context for an optimizer step, after which the step may see other tensors as parameters."""
        with super().outside_of_hooks():
            yield
        self._pipeline.all_stages.mark(self._module)

    @override
    def in_closure(self) -> AbstractContextManager[None]:
        """Return a context in which the step's closure works on the parameters of all stages, as the step does."""
        return self._pipeline.all_stages.hook_context("training_step")

    @override
    def backward(self, loss: Tensor, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Run a backward that the step has asked for. This is a collective."""
        loss = self._precision.pre_backward(loss, self._module)
        with self._in_turn.backward(), self._parallel.backward():
            self._precision.backward(loss, self._module, optimizer, *args, **kwargs)
        return self._precision.post_backward(loss, self._module)
