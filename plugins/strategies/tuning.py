"""Let Lightning's BatchSizeFinder and LearningRateFinder work with several ranks, or refuse them by name."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.mesh.consensus import OtherRankError, timed_barrier
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.plugins import _compat

__all__ = ["TUNING_CHECKPOINTS", "agree_on_trials", "is_of_tuning", "refuse_batch_size_finder"]

TUNING_CHECKPOINTS = (".scale_batch_size_", ".lr_find_")
"""The first characters of the names of the checkpoints by which finders restore the module, followed by random ones."""

_SECONDS_TO_ARRIVE = 30.0
"""Seconds for which a rank that has run out of memory in a trial waits for the others to run out of it as well."""


def is_of_tuning(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is that of a checkpoint of a finder, whose name differs between ranks."""
    return os.path.basename(os.fspath(path)).startswith(TUNING_CHECKPOINTS)


def refuse_batch_size_finder(trainer: Trainer, layout: ParallelLayout, global_batch_size: int | None) -> None:
    """Refuse a BatchSizeFinder where its result would mean nothing, or where ranks cannot agree on it.

    Raises:
        MisconfigurationException: If a BatchSizeFinder is among the callbacks, and the model is cut into stages or the
            size of a batch is given.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        return
    if layout.pp > 1:
        raise MisconfigurationException(
            f"BatchSizeFinder with pp_size={layout.pp}: it tries batches until memory runs out, and the stages of a"
            " pipeline need different amounts of it, so that one rank would run out alone. Remove the callback, and"
            " raise the batch size by hand; perf and memory figures of the run show how much is free."
        )
    if global_batch_size is not None:
        raise MisconfigurationException(
            f"BatchSizeFinder with global_batch_size={global_batch_size}: the strategy sets the batch size of training"
            " loaders, so that the sizes that the callback tries would have no effect. Leave one of the two out."
        )


def agree_on_trials(trainer: Trainer) -> None:
    """Let all ranks end each trial of a finder in the same way, and find the same value.

    Args:
        trainer: A Trainer that is about to run, whose processes have been launched.
    """

    def agree(error: Exception | None) -> Exception | None:
        """Return the error if any rank has run out of memory in a trial. This is a collective over all processes."""
        try:
            timed_barrier("The end of a trial of BatchSizeFinder", _SECONDS_TO_ARRIVE)
        except OtherRankError as others:
            raise OtherRankError(
                f"{others} This rank {'has run out of memory' if error else 'has ended the trial'}, and others have"
                " not: BatchSizeFinder needs ranks that need equal amounts of memory. Set max_val below the size of"
                " this trial, or remove the callback."
            ) from error
        if not trainer.strategy.reduce_boolean_decision(error is not None, all=False):
            return None
        strategy: Any = trainer.strategy
        strategy.parallel.free()  # The step has ended without freeing gathered parameters.
        return error or RuntimeError("CUDA out of memory: another rank has run out of memory in this trial.")

    _compat.agree_on_trials(trainer, agree)
