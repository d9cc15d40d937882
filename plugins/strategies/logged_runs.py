"""Let a training that is resumed continue the runs of its loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_dist.checkpoint import CheckpointError, read_manifest
from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.plugins.strategies.bookkeeping import absolute
from lightning_dist.plugins.strategies.resume_path import ResumePath, candidates

__all__ = ["continue_logging", "continue_runs", "runs_of"]


def runs_of(trainer: Trainer) -> dict[str, str]:
    """Return a checkpoint's entries about the run that its training logs to; empty on ranks other than 0."""
    loggers = _mlflow_loggers(trainer)
    entries = loggers[0].entries_for_checkpoint() if loggers else None
    return entries or {}


def continue_runs(trainer: Trainer, path: Any) -> None:
    """Tell the loggers to which run the training of a checkpoint has logged, before they start one.

    Args:
        trainer: A Trainer that begins a fit.
        path: The checkpoint's path, as :func:`~lightning_dist.plugins.strategies.resume_path.resolve_ckpt_path` has
            returned it; None: the training begins.
    """
    loggers = _mlflow_loggers(trainer)
    if path is None or not loggers:
        return
    for found in candidates(path) if isinstance(path, ResumePath) else [absolute(path)]:
        try:
            about = read_manifest(found).about
        except (CheckpointError, OSError):  # It is reported, and another one chosen, when the checkpoint is loaded.
            continue
        continue_logging(trainer, about, int(about["global_step"]))
        return


def continue_logging(trainer: Trainer, about: Mapping[str, Any], step: int) -> None:
    """Tell the loggers to which run a training has logged, before they start one.

    Args:
        trainer: A Trainer that continues the training.
        about: What :func:`runs_of` has returned in the process that logged, and possibly other entries.
        step: Number of optimizer steps so far.
    """
    if "mlflow_training" in about:
        for logger in _mlflow_loggers(trainer):
            logger.continue_training(about["mlflow_training"], about.get("mlflow_run"), step)


def _mlflow_loggers(trainer: Trainer) -> list[MLflowLogger]:
    """Return the loggers that log to MLflow; none on other ranks than 0."""
    return [logger for logger in trainer.loggers if isinstance(logger, MLflowLogger) and trainer.is_global_zero]
