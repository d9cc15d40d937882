"""Choose the kind of steps that a module runs, and provide its first step for the plans of techniques."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from typing_extensions import override

from lightning_dist.parallel_module import ParallelModule
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.checks import refuse_for_pipeline
from lightning_dist.plugins.strategies.steps.base import Steps
from lightning_dist.plugins.strategies.steps.example_step import FakeStep, example_args, fake_step
from lightning_dist.plugins.strategies.steps.in_turn import StepsInTurn
from lightning_dist.plugins.strategies.steps.manual_trace import manual_operations, manual_operations_on_fakes
from lightning_dist.plugins.strategies.steps.microbatching import BatchSplitter
from lightning_dist.plugins.strategies.steps.pipelined import PipelinedSteps
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.plugins.strategies.steps.whole import WholeSteps
from lightning_dist.techniques.options import FirstStep, StepOnMicrobatch, StepSource

__all__ = ["FirstSteps", "make_steps"]


def make_steps(module: LightningModule, parallel: ParallelModule, precision: Precision, tracing: StepTracing) -> Steps:
    """Create the object that runs the steps of ``module``, of the first kind that can run them.

    Args:
        module: The LightningModule whose steps are run.
        parallel: The engine's object for ``module``, which gathers its parameters and reduces its gradients.
        precision: Lightning's precision plugin, in whose contexts steps run and which scales losses.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
    """
    kinds: tuple[type[Steps], ...] = (StepsInTurn, PipelinedSteps, WholeSteps)
    kind = next(kind for kind in kinds if kind.can_run(parallel))
    return kind(module, parallel, precision, tracing)


class FirstSteps(StepSource):
    """Provide the first step of a run, which is run on fakes to find plans and stages.

    Args:
        module: The user's module, or a copy of it.
        trainer: The Trainer whose run begins, which gives the first batch.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
    """

    def __init__(self, module: LightningModule, trainer: Trainer, tracing: StepTracing) -> None:
        self._module = module
        self._trainer = trainer
        self._tracing = tracing

    @cached_property
    def _args(self) -> tuple[tuple[Any, ...], str]:
        return example_args(self._trainer)

    @override
    def whole(self) -> FirstStep:
        """Return the step that the run begins with. This is a collective over all processes."""
        args, why_not = self._args
        if why_not:
            return FirstStep(None, why_not)
        is_automatic = self._module.automatic_optimization
        around = nullcontext if is_automatic else partial(manual_operations, self._module)
        return FirstStep(self._fake_step(args, around), "")

    @override
    def on_microbatch(self, wanted: int | None, most: int) -> StepOnMicrobatch:
        """Return the step on one microbatch. This is a collective over all processes.

        Raises:
            MisconfigurationException: If the module does something that a pipeline cannot.
            ValueError: If the batch cannot be split.
        """
        refuse_for_pipeline(self._module)
        args, why_not = self._args
        if why_not:
            return StepOnMicrobatch(wanted or 1, why_no_step=why_not)
        if not self._module.automatic_optimization:
            around = partial(manual_operations_on_fakes, self._module, self._tracing)
            step, step_in_run = self._fake_step(args, around), self._fake_step(args, around, is_in_run=True)
            return StepOnMicrobatch(wanted or 1, step, step_in_run, has_loss=False, in_turn=True)
        splitter = BatchSplitter(self._module)
        number = splitter.choose_number(args[0], wanted, most)
        part = (splitter.split(args[0], number)[0], *args[1:])
        around = partial(self._tracing.around, self._module)
        step, step_in_run = self._fake_step(part, around), self._fake_step(part, around, is_in_run=True)
        return StepOnMicrobatch(number, step, step_in_run, has_loss=self._name == "training_step")

    @property
    def _name(self) -> str:
        return _compat.step_name(self._trainer)

    def _fake_step(
        self, args: tuple[Any, ...], around: Callable[[], AbstractContextManager[None]], is_in_run: bool = False
    ) -> FakeStep:
        return fake_step(self._module, self._trainer, self._name, args, {}, around, is_in_run)
