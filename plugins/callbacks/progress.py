"""Show the progress of a whole run, in steps, on Lightning's progress bar."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

__all__ = ["RunProgressBar"]


class RunProgressBar(RichProgressBar):
    """Show the optimizer steps of the whole run and the time that is left, instead of the batches of the epoch.

    The bar also shows the throughput and the FLOPs utilization that
    :class:`~lightning_dist.plugins.callbacks.StepTelemetry` measures. Where the number of steps is not known, because
    neither ``max_steps`` nor the length of an epoch is, it is Lightning's own bar.
    """

    _num_steps = 0

    @property
    @override
    def total_train_batches(self) -> int | float:
        """Return the number of steps of the run, or that of batches of the epoch if the former is not known."""
        return self._num_steps or super().total_train_batches

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_steps = 0
        number = trainer.estimated_stepping_batches
        # Of several optimizers, max_steps counts the steps of each, and the length of the epochs says nothing of them.
        if math.isfinite(number) and (pl_module.automatic_optimization or number == trainer.max_steps):
            self._num_steps = int(number)
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._num_steps or self.is_disabled:
            super().on_train_epoch_start(trainer, pl_module)
            return
        assert self.progress is not None
        if self.train_progress_bar_id is None:
            self.train_progress_bar_id = self.progress.add_task("", total=self._num_steps)
            # A run that resumes begins with the steps that were done before; its speed is that of the others.
            self.progress.reset(self.train_progress_bar_id, total=self._num_steps, completed=trainer.global_step)
        self.progress.update(self.train_progress_bar_id, description=f"Epoch {trainer.current_epoch}, step")
        self.refresh()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        index = trainer.global_step - 1 if self._num_steps else batch_idx
        super().on_train_batch_end(trainer, pl_module, outputs, batch, index)

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return what the bar shows: rates without decimals, and a utilization as a percentage."""
        metrics = super().get_metrics(trainer, pl_module)
        for name, spec in (("tokens/s", ",.0f"), ("samples/s", ",.0f"), ("mfu", ".1%")):
            if name in metrics:
                metrics[name] = format(metrics[name], spec)
        return metrics
