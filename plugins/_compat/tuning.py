"""Change what Lightning's finders of batch sizes and learning rates do with several processes.

The module was tested with Lightning 2.6. Support for distributed strategies in these callbacks could replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_dist.plugins._compat.loops import loop_of_evaluation

__all__ = ["agree_on_trials", "reduce_losses_of_finders"]


def agree_on_trials(trainer: Trainer, agree: Callable[[Exception | None], Exception | None]) -> None:
    """Let each BatchSizeFinder of ``trainer`` run with several processes.

    Args:
        trainer: A Trainer that is about to run.
        agree: Function that all ranks call at the end of a trial, with the error of a rank that has run out of memory,
            and that returns the error to raise on this rank, if any rank has.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, BatchSizeFinder):
            vars(callback)["setup"] = _hiding_processes(callback)
            vars(callback)["scale_batch_size"] = _agreeing(callback, agree)


def _hiding_processes(callback: BatchSizeFinder) -> Callable[..., None]:
    def setup(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        connector = trainer._accelerator_connector
        own = type(connector)
        alone = type(own.__name__, (own,), {"is_distributed": False})
        connector.__class__ = alone
        try:
            type(callback).setup(callback, trainer, *args, **kwargs)
        finally:
            connector.__class__ = own

    return setup


def _agreeing(callback: BatchSizeFinder, agree: Callable[[Exception | None], Exception | None]) -> Callable[..., None]:
    def scale_batch_size(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        loop = trainer.fit_loop if trainer.training else loop_of_evaluation(trainer)

        def run() -> Any:
            result: Any = None
            error: Exception | None = None
            try:
                result = type(loop).run(loop)
            except RuntimeError as raised:
                if not is_oom_error(raised):
                    raise
                error = raised
            error = agree(error)
            if error is not None:
                raise error
            return result

        vars(loop)["run"] = run
        try:
            type(callback).scale_batch_size(callback, trainer, *args, **kwargs)
        finally:
            vars(loop).pop("run", None)

    return scale_batch_size


def reduce_losses_of_finders(is_ours: Callable[[Any], bool]) -> None:
    """Let LearningRateFinder look at the mean of the losses of all ranks; calling this again is safe.

    Args:
        is_ours: Function that returns whether a strategy is one for which this holds.
    """
    on_batch_end = _LRCallback.on_train_batch_end
    if hasattr(on_batch_end, "__wrapped__"):
        return

    @wraps(on_batch_end)
    def reduced(self: Any, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs and is_ours(trainer.strategy):
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
            outputs = {"loss": trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")}
        on_batch_end(self, trainer, pl_module, outputs, batch, batch_idx)

    _LRCallback.on_train_batch_end = reduced  # type: ignore[method-assign]
