"""How far Lightning's loops are, from their private state; and that state mended where a resume from it goes wrong.

Tried with 2.6. All of it would be replaced by a public view of the loops' progress, and fixes of Lightning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

__all__ = [
    "TrainingProgress",
    "finish_batch_on_resume",
    "finish_epoch",
    "go_back_to_last_update",
    "leave_finished_epoch",
    "training_progress",
]


@dataclass
class TrainingProgress:
    """How far a fit is in its epoch.

    Args:
        epoch: Which; counted from 0.
        has_begun: Whether the epoch has.
        num_batches: Of it that are done.
        in_window: How many of these were accumulated since the last optimizer step.
        is_done: Whether all are.
    """

    epoch: int
    has_begun: bool
    num_batches: int
    in_window: int
    is_done: bool


def training_progress(trainer: Trainer) -> TrainingProgress:
    """Return how far ``trainer`` is."""
    loop = trainer.fit_loop.epoch_loop
    # Typed by a base class that has not all of their counts.
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = loop.batch_progress.current
    is_done = batches.processed == batches.ready and loop._num_ready_batches_reached()
    in_window = 0 if is_done else batches.processed % trainer.accumulate_grad_batches
    return TrainingProgress(epochs.processed, epochs.started == epochs.ready, batches.processed, in_window, is_done)


def go_back_to_last_update(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Change what the fit loop saves in the middle of an accumulation, so that a resume accumulates from its start.

    The gradients so far are in no checkpoint.
    """
    batches = loops["fit_loop"]["epoch_loop.batch_progress"]
    in_window = training_progress(trainer).in_window
    for name in ("total", "current"):
        batches[name] = dict.fromkeys(batches[name], batches[name]["processed"] - in_window)
    _count_update_once(trainer, loops)


def finish_epoch(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Change what the fit loop saves at an epoch's end, so that a resume begins with the next one.

    Lightning would count the epoch twice where ``max_steps`` is set.
    """
    progress = loops["fit_loop"]
    epochs, batches = progress["epoch_progress"], progress["epoch_loop.batch_progress"]
    total = epochs["total"]
    if total["completed"] != total["processed"] - 1 or not total["processed"] == total["started"] == total["ready"]:
        return
    for name in ("total", "current"):
        epochs[name]["completed"] += 1
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    if trainer.max_steps != -1:
        _count_update_once(trainer, loops)


def _count_update_once(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Where a validation was due after the last batch of ``loops``, Lightning will skip it, but count its update again.

    ``_batches_that_stepped`` is the step under which metrics are logged.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    saved = loops["fit_loop"]["epoch_loop.batch_progress"]
    total, current = loop.batch_progress.total, loop.batch_progress.current
    before = total.ready, current.ready, loop.batch_progress.is_last_batch
    total.ready, current.ready = saved["total"]["ready"], saved["current"]["ready"]
    loop.batch_progress.is_last_batch = saved["is_last_batch"]
    if fetcher is not None and loop._should_check_val_fx(fetcher):
        loops["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    total.ready, current.ready, loop.batch_progress.is_last_batch = before


def finish_batch_on_resume(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Change what the fit loop saves after a batch, so that what is due after it is done on a resume.

    Lightning leaves out the validation that is due after the batch, and the end of the epoch after its last batch.

    Args:
        trainer: In a fit.
        loops: Of the checkpoint.
    """
    loop, fetcher, progress = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher, loops["fit_loop"]
    batches = progress["epoch_loop.batch_progress"]
    if fetcher is None or batches["total"]["completed"] != batches["total"]["processed"] - 1:
        return
    if trainer.enable_validation and loop._should_check_val_fx(fetcher):
        _run_validation_on_resume(progress)
    elif loop._num_ready_batches_reached():
        progress["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    else:
        return
    for count in ("total", "current"):
        batches[count]["completed"] += 1


def _run_validation_on_resume(progress: dict[str, Any]) -> None:
    """Let it look as if the validation's first batch had been begun: then Lightning goes back to it."""
    batches = progress["epoch_loop.val_loop.batch_progress"]
    done = batches["total"]["completed"]
    batches["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    batches["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}


def leave_finished_epoch(trainer: Trainer) -> None:
    """At the start of a resumed fit: where nothing of the epoch is left but its end, go on with that.

    Lightning would fetch another batch.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    batches = loop.batch_progress.current
    is_done = batches.completed > 0 and batches.completed == batches.ready and loop._num_ready_batches_reached()
    if not loop.restarting or not is_done or fetcher is None:
        return
    if trainer.enable_validation and loop._should_check_val_fx(fetcher):
        return

    def end_epoch(data_fetcher: Any) -> None:
        del vars(loop)["run"]
        loop.reset()
        loop.restarting = False

    vars(loop)["run"] = end_epoch
