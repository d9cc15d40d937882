"""Read the state of Lightning's loops, and run functions at points where the loops have no hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, WeightAveraging
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim.swa_utils import AveragedModel

__all__ = [
    "agree_on_decisions",
    "allow_skipped_steps",
    "around_every_batch",
    "average_model",
    "before_reducing_evaluation",
    "before_validation",
    "changes_accumulation",
    "evaluate_without_inference_mode",
    "is_first_batch",
    "leave_signals_alone",
    "logging_step",
    "loop_of_evaluation",
    "num_fetched",
    "observe_fetching",
    "output_of_step",
    "put_training_weights_back",
    "scheduled_accumulation",
    "step_name",
]


def logging_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs the current batch's metrics.

    ``trainer.global_step`` counts every optimizer's steps, so that two optimizers advance it by two per batch; curves
    over it would not line up with those of ``self.log``. This could be replaced by a public property of the Trainer,
    which LearningRateMonitor would use too.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def observe_fetching(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` and ``after`` around every wait for a training batch, from the start of the next epoch on.

    This could be replaced by a hook around the fetching of a batch. A profiler could observe it, but would slow down
    every other action too.
    """
    loop = trainer.fit_loop.epoch_loop
    on_before_fetch, on_after_fetch = loop._on_before_fetch, loop._on_after_fetch

    def observed_before() -> None:
        before()
        on_before_fetch()

    def observed_after() -> None:
        on_after_fetch()
        after()

    loop._on_before_fetch, loop._on_after_fetch = observed_before, observed_after  # type: ignore[method-assign]


def around_every_batch(
    trainer: Trainer, name: str, before: Callable[[], None], after: Callable[[], None] | None = None
) -> None:
    """Call ``before`` before every training batch is fetched, and ``after`` after the last hook of the batch.

    This could be replaced by hooks at these places: ``on_train_batch_start`` runs after the batch has been created,
    which may have drawn random numbers, and ``on_train_batch_end`` of a strategy does not exist.

    Args:
        trainer: The Trainer of the fit.
        name: Name of the functions; a later call for ``trainer`` with the same name replaces them.
        before: A function without arguments, which is called before each batch.
        after: A function without arguments, which is called after each batch, before a validation; None: nothing is.
    """
    loop = trainer.fit_loop.epoch_loop
    functions: dict[str, tuple[Callable[[], None], Callable[[], None] | None]]
    functions = getattr(vars(loop).get("advance"), "functions", {})
    functions[name] = before, after

    def advance(data_fetcher: Any) -> None:
        for function, _ in functions.values():
            function()
        type(loop).advance(loop, data_fetcher)
        for _, function_after in functions.values():
            if function_after is not None:
                function_after()

    advance.functions = functions  # type: ignore[attr-defined]
    vars(loop)["advance"] = advance


def loop_of_evaluation(trainer: Trainer) -> Any:
    """Return the loop of the evaluation or prediction that ``trainer`` runs, or of the validations of its fit."""
    assert trainer.state.fn is not None
    return {
        TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]


def is_first_batch(trainer: Trainer) -> bool:
    """Return whether no batch of the epoch has been fetched.

    This could be replaced by a public property of the loop.
    """
    return num_fetched(trainer) == 0


def num_fetched(trainer: Trainer) -> int:
    """Return the number of batches of the epoch that have been fetched, with the one that is being trained on.

    This could be replaced by a public property of the loop.
    """
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Run evaluations under ``torch.no_grad`` in place of inference mode.

    In inference mode, torch cannot detach a DTensor, as ``state_dict()`` does, and tensors that are made then, such as
    gathered parameters, cannot be trained later. Lightning does the same for its own FSDP strategy, and for gloo.
    This could be replaced by an attribute of strategies that the loops ask for, or by a torch that can detach DTensors.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def before_validation(trainer: Trainer, function: Callable[[], None]) -> None:
    """Call ``function`` before each validation of a fit, and before its first hook.

    This could be replaced by a hook of strategies at this place: theirs run after those of callbacks.

    Args:
        trainer: The Trainer of the fit.
        function: The function; that of a later call for ``trainer`` replaces it.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop

    def on_run_start() -> None:
        function()
        type(loop).on_run_start(loop)

    vars(loop)["on_run_start"] = on_run_start


def before_reducing_evaluation(trainer: Trainer, function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` after the last batch of each loader of an evaluation, before logged values are reduced.

    Functions are called in the order in which they were given. In a prediction they are called once, after all loaders.
    This could be replaced by a hook at this place: Lightning's first hook runs after the logged values have been
    reduced.

    Args:
        trainer: The Trainer whose evaluation or prediction begins.
        function: The function to call.

    Returns:
        A function that stops these calls.
    """
    loop = loop_of_evaluation(trainer)
    name = "on_run_end" if trainer.predicting else "_store_dataloader_outputs"
    functions: list[Callable[[], None]] = getattr(vars(loop).get(name), "functions", [])
    functions.append(function)

    def observed() -> Any:
        for each in list(functions):
            each()
        return getattr(type(loop), name)(loop)

    observed.functions = functions  # type: ignore[attr-defined]
    vars(loop)[name] = observed

    def stop() -> None:
        if function in functions:
            functions.remove(function)
        if not functions:
            vars(loop).pop(name, None)

    return stop


_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def step_name(trainer: Trainer) -> str:
    """Return the name of the module's step that ``trainer`` is about to run."""
    assert trainer.state.fn is not None
    return _STEPS[trainer.state.fn]


def agree_on_decisions(trainer: Trainer) -> None:
    """Make all ranks follow the first rank in decisions that Lightning lets each rank take by its own values.

    Schedulers of learning rates may monitor a metric that is logged without ``sync_dist``, but shards of one weight
    must not be trained with different rates. A ``val_check_interval`` in seconds is measured by each rank's own clock.
    This could be replaced by hooks for both.
    """
    loop = trainer.fit_loop.epoch_loop

    def monitored(key: str) -> Any:
        value = type(loop)._get_monitor_value(loop, key)
        agreed: float | None = trainer.strategy.broadcast(None if value is None else float(value))
        if isinstance(value, torch.Tensor) and agreed is not None:
            return torch.as_tensor(agreed, dtype=value.dtype, device=value.device)
        return agreed

    def validates_now(data_fetcher: Any) -> bool:
        decision: bool = type(loop)._should_check_val_fx(loop, data_fetcher)
        is_by_time = trainer.val_check_batch is None
        return bool(trainer.strategy.broadcast(decision)) if is_by_time else decision

    vars(loop).update(_get_monitor_value=monitored, _should_check_val_fx=validates_now)


def allow_skipped_steps(trainer: Trainer) -> None:
    """Let ``training_step`` return None on some ranks, which then leave out the backward.

    Lightning raises an error then if there are several processes, because it assumes that gradients are reduced.
    This could be replaced by a property of strategies that says whether they reduce gradients.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    loop.output_result_cls = _SkippableResult


class _Skipped(dict[str, Any]):
    """Say that ``training_step`` has returned None."""


class _SkippableResult(ClosureResult):
    """Hold the output of ``training_step``, which may be :class:`_Skipped`."""

    @classmethod
    def from_training_step_output(cls, training_step_output: STEP_OUTPUT, normalize: int = 1) -> ClosureResult:
        output = None if isinstance(training_step_output, _Skipped) else training_step_output
        return super().from_training_step_output(output, normalize)


def output_of_step(trainer: Trainer, output: STEP_OUTPUT) -> STEP_OUTPUT:
    """Return what a strategy returns to Lightning for the ``output`` of ``training_step``.

    It differs from ``output`` if that is None, and :func:`allow_skipped_steps` was called for ``trainer``.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    return _Skipped() if output is None and loop.output_result_cls is _SkippableResult else output


def leave_signals_alone(trainer: Trainer) -> None:
    """Keep Lightning from handling signals in this run, because its handler deadlocks if only one rank gets a SIGTERM.

    This could be replaced by a way to give a Trainer another handler.
    """
    vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None


def put_training_weights_back(trainer: Trainer) -> None:
    """Undo the swap by which averaging callbacks run the current validation with averaged weights."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            callback.on_validation_epoch_end(trainer, trainer.lightning_module)


def changes_accumulation(trainer: Trainer) -> bool:
    """Return whether ``accumulate_grad_batches`` changes during the fit.

    This could be replaced by a public property of the Trainer.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)


def scheduled_accumulation(trainer: Trainer, epoch: int) -> int:
    """Return the number of batches that a :class:`GradientAccumulationScheduler` accumulates in ``epoch``."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    scheduler = next(callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler))
    return scheduler.get_accumulate_grad_batches(epoch)


def average_model(callback: Callback) -> AveragedModel | None:
    """Return the averaged model of a ``WeightAveraging`` callback; None for other callbacks.

    This could be replaced by a public property of the callback.
    """
    return callback._average_model if isinstance(callback, WeightAveraging) else None
