"""Read the progress of Lightning's loops from their private state, and correct it where a resume would go wrong.

The module was tested with Lightning 2.6. A public view of the loops' progress, and fixes in Lightning, could replace
this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

__all__ = [
    "TrainingProgress",
    "count_batches",
    "leave_finished_epoch",
    "leave_out_running_batch",
    "prepare_resume",
    "training_progress",
]


@dataclass
class TrainingProgress:
    """Describe how far a fit is in its epoch.

    Args:
        epoch: Index of the epoch, from 0.
        has_begun: Whether the epoch has begun.
        num_batches: Number of the epoch's batches that are done, on this rank.
        in_window: Number of these batches that were accumulated since the last optimizer step.
        is_done: Whether all batches of the epoch are done.
    """

    epoch: int
    has_begun: bool
    num_batches: int
    in_window: int
    is_done: bool


def training_progress(trainer: Trainer) -> TrainingProgress:
    """Return the progress of the fit of ``trainer``."""
    loop = trainer.fit_loop.epoch_loop
    # Lightning types these by a base class that lacks some of their counts.
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = loop.batch_progress.current
    is_done = batches.processed == batches.ready and loop._num_ready_batches_reached()
    in_window = 0 if is_done else batches.processed % trainer.accumulate_grad_batches
    return TrainingProgress(epochs.processed, epochs.started == epochs.ready, batches.processed, in_window, is_done)


def count_batches(trainer: Trainer, num_batches: int) -> None:
    """Set the number of batches that a resumed fit counts as done, because their size has changed.

    Args:
        trainer: The Trainer whose fit is about to resume.
        num_batches: Number of done batches of the current epoch, in batches of the new size.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    change = num_batches - progress.current.processed
    for count in (progress.total, progress.current):
        for name in ("ready", "started", "processed", "completed"):
            setattr(count, name, getattr(count, name) + change)


def leave_out_running_batch(loops: dict[str, Any]) -> None:
    """Change the saved state of a fit's loops, so that a batch that was only fetched is not counted.

    Args:
        loops: The ``"loops"`` of the checkpoint dictionary, which are changed in place.
    """
    batches = loops["fit_loop"]["epoch_loop.batch_progress"]
    for name in ("total", "current"):
        batches[name] = dict.fromkeys(batches[name], batches[name]["processed"])
    batches["is_last_batch"] = False


def prepare_resume(trainer: Trainer, loops: dict[str, Any]) -> None:
    """Change the saved state of a fit's loops, so that a resume does exactly once what is due after the save.

    With Lightning's own state, a resume would leave out the validation that is due after a batch, the part of a
    validation that was done before the save, and the end of an epoch after its last batch. It would also continue in
    the middle of an accumulation without the gradients so far, and count an epoch or an update twice.

    Args:
        trainer: The Trainer whose fit saves the checkpoint.
        loops: The ``"loops"`` of the checkpoint dictionary, which are changed in place.
    """
    loop, progress = trainer.fit_loop.epoch_loop, loops["fit_loop"]
    epochs, batches = progress["epoch_progress"]["total"], progress["epoch_loop.batch_progress"]["total"]
    if training_progress(trainer).in_window:
        _go_back_to_last_update(trainer, progress)
    elif trainer.validating:
        validation = progress["epoch_loop.val_loop.batch_progress"]
        current = validation["current"]
        if not (validation["is_last_batch"] and current["processed"] == current["ready"]):
            _run_validation(progress)
    elif epochs["completed"] == epochs["processed"] - 1:
        _begin_next_epoch(trainer, progress)
    elif epochs["processed"] == epochs["started"] - 1 and trainer.fit_loop._data_fetcher is not None:
        if batches["completed"] == batches["processed"] - 1:
            _finish_batch(trainer, progress)
        elif not loop.restarting:
            _count_update_once(trainer, progress)


def _go_back_to_last_update(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Set the number of batches back to that of the last optimizer step, as a resume has no accumulated gradients."""
    batches = progress["epoch_loop.batch_progress"]
    in_window = training_progress(trainer).in_window
    for name in ("total", "current"):
        batches[name] = dict.fromkeys(batches[name], batches[name]["processed"] - in_window)
    _count_update_once(trainer, progress)


def _begin_next_epoch(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Count the epoch as completed for a save at its end, so that a resume begins the next one."""
    batches = progress["epoch_loop.batch_progress"]
    for name in ("total", "current"):
        progress["epoch_progress"][name]["completed"] += 1
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    if trainer.max_steps != -1:
        _count_update_once(trainer, progress)


def _finish_batch(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Count the batch as completed for a save after it, before Lightning has counted its end."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    if trainer.enable_validation and loop._should_check_val_fx(fetcher):
        _run_validation(progress)
    elif loop._num_ready_batches_reached():
        progress["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    else:
        return
    for name in ("total", "current"):
        progress["epoch_loop.batch_progress"][name]["completed"] += 1


def _run_validation(progress: dict[str, Any]) -> None:
    """Mark the validation's first batch as begun but not done, so that a resume starts the validation again."""
    batches = progress["epoch_loop.val_loop.batch_progress"]
    done = batches["total"]["completed"]
    batches["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    batches["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}


def _count_update_once(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Subtract the update that a resume would count twice.

    If a validation was due after the last batch, a resume skips it, but counts the batch's update again in
    ``_batches_that_stepped``, which is the step under which metrics are logged.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    saved = progress["epoch_loop.batch_progress"]
    total, current = loop.batch_progress.total, loop.batch_progress.current
    before = total.ready, current.ready, loop.batch_progress.is_last_batch
    total.ready, current.ready = saved["total"]["ready"], saved["current"]["ready"]
    loop.batch_progress.is_last_batch = saved["is_last_batch"]
    if fetcher is not None and loop._should_check_val_fx(fetcher):
        progress["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    total.ready, current.ready, loop.batch_progress.is_last_batch = before


def leave_finished_epoch(trainer: Trainer) -> None:
    """Run only the end of the epoch at the start of a resumed fit, if all batches of the epoch are done.

    Lightning itself would first fetch another batch.
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
