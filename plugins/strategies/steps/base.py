"""Define the interface of all kinds of steps, through which Lightning's loops use the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.parallel_module import ParallelModule
from lightning_dist.plugins.strategies.steps.tracing import StepTracing
from lightning_dist.plugins.strategies.steps.weighting import LossWeights
from lightning_dist.techniques.shards_in_hooks import ShardsInHooks

__all__ = ["Steps", "begins_accumulation"]


def begins_accumulation(trainer: Trainer) -> bool:
    """Return whether the next training step is the first of those whose gradients are reduced together."""
    return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0


class Steps(ABC):
    """Run the steps of a LightningModule.

    Args:
        module: The LightningModule whose steps are run.
        parallel: The engine's object for ``module``, which gathers its parameters and reduces its gradients.
        precision: Lightning's precision plugin, in whose contexts steps run and which scales losses.
        tracing: Object that replaces collectives by stand-ins while a step is traced.
    """

    def __init__(
        self, module: LightningModule, parallel: ParallelModule, precision: Precision, tracing: StepTracing
    ) -> None:
        self._module = module
        self._parallel = parallel
        self._precision = precision
        self._tracing = tracing
        self._weights = LossWeights()
        self._shards = ShardsInHooks()
        self._has_more_batches = False

    def wait_before_changes(self, wait: Callable[[], None]) -> None:
        """Let ``wait`` be called before a hook changes a tensor in place.

        Args:
            wait: Function without arguments that returns once a save in progress has copied the tensors.
        """
        self._shards.before_change = wait

    @classmethod
    def can_run(cls, parallel: ParallelModule) -> bool:
        """Return whether steps of this kind can run on ``parallel``."""
        return True

    @abstractmethod
    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run ``training_step``, and return its result. This is a collective.

        Args:
            args: Positional arguments of the step, the batch first.
            kwargs: Keyword arguments of the step.
        """

    @abstractmethod
    def backward(self, loss: Tensor, optimizer: Optimizer | None, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Add the gradients of ``loss`` to the parameters, and reduce them unless further batches are accumulated.

        This is a collective if gradients are reduced.

        Args:
            loss: The loss, divided by the number of batches that are accumulated.
            optimizer: Optimizer that the precision plugin's backward is given; None in manual optimization.
            args: Further positional arguments of the module's ``backward``.
            kwargs: Keyword arguments of the module's ``backward``.

        Returns:
            The loss for Lightning to log.
        """

    @abstractmethod
    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run a step without a backward, and return its result. This is a collective.

        Args:
            name: Name of the step's method, such as ``validation_step``.
            args: Positional arguments of the step, the batch first.
            kwargs: Keyword arguments of the step.
        """

    @abstractmethod
    def around_hook(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a hook of the module or of a callback, in which it may use and change parameters.

        Args:
            name: The hook's name, such as ``Model.on_fit_start``.
        """

    @contextmanager
    def before_last_batch(self) -> Iterator[None]:
        """Return a context for a batch of an accumulation that is not its last one.

        The sum of the weights of losses is known, and gradients can be divided by it, only after the last one, also if
        the backward of each batch reduces its gradients.
        """
        self._has_more_batches = True
        try:
            yield
        finally:
            self._has_more_batches = False

    def outside_of_hooks(self) -> AbstractContextManager[None]:
        """Return a context for an optimizer step within a hook, in which shards behave as they do outside of hooks."""
        return self._shards.paused()

    def in_closure(self) -> AbstractContextManager[None]:
        """Return a context for the closure that an optimizer step calls, within :meth:`outside_of_hooks`."""
        return nullcontext()

    def _context(self, name: str) -> AbstractContextManager[None]:
        """Return the precision plugin's context for the step ``name``."""
        contexts = {
            "training_step": self._precision.train_step_context,
            "validation_step": self._precision.val_step_context,
            "test_step": self._precision.test_step_context,
            "predict_step": self._precision.predict_step_context,
        }
        return contexts[name]()

    def _normalize_gradients(self) -> None:
        """Divide gradients by the sum of the losses' weights after the last batch of an accumulation.

        This is a collective then, if losses have weights.
        """
        if not self._has_more_batches:
            self._weights.normalize(self._module.parameters(), self._module.trainer.accumulate_grad_batches)
