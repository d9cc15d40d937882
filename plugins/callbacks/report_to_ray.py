"""Report the metrics and the checkpoints of a Trainer to Ray."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

__all__ = ["ReportToRay"]

_POINTER = "pointer_ckpt.json"
"""Name of the file that refers to a checkpoint elsewhere, as Ray's documentation calls it."""


class ReportToRay(Callback):
    """Report the Trainer's metrics to Ray after each validation and each epoch, in workers that run ``as_rank``.

    The newest checkpoint is reported by its path, and not copied: what Ray keeps is a folder with a file
    ``pointer_ckpt.json`` whose ``uri`` is the path. All nodes must share the folder of the checkpoints.
    """

    def __init__(self) -> None:
        self._reported: tuple[int, str] | None = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the metrics of a validation that belongs to a training."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._report(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the metrics of an epoch, if no validation has reported them."""
        self._report(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a checkpoint that was saved after the last report."""
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        import ray.train  # It is an extra.

        callback = trainer.checkpoint_callback
        path = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
        if self._reported == (trainer.global_step, path):
            return
        self._reported = (trainer.global_step, path)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if not path or not trainer.is_global_zero:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, _POINTER).write_text(json.dumps({"uri": path}))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
