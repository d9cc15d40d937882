"""Compare the prediction of a plan with what its run needs."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_dist.plugins._compat import logging_step
from lightning_dist.plugins.planning.planned import Planned

__all__ = ["PredictionReport"]

_FIRST, _LAST, _FEWEST = 3, 20, 5
"""The first and the last optimizer step that are measured, and the smallest number of them."""


class PredictionReport(Callback):
    """Log the predicted and the measured time of a step, once in a training, after 20 optimizer steps or at its end.

    =========================== ==========================================================
    metric                      meaning
    =========================== ==========================================================
    ``plan/step_ms``            measured time of an optimizer step, the median
    ``plan/step_ms_predicted``  predicted time of an optimizer step
    ``plan/step_ms_error``      predicted time divided by the measured one, minus 1
    ``plan/peak_mib_predicted`` predicted peak of a rank's tensors
    =========================== ==========================================================

    The times are those of rank 0 from step to step, with everything between two of them, such as the loading of data.
    The first two steps do not count, and a training of fewer than 7 logs nothing. The measured peak is
    ``memory/peak_of_model_mib``.

    Args:
        planned: The prediction, with a time.
    """

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self._ends: list[float] = []
        self._num_steps = 0
        self._is_done = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ends.clear()
        self._num_steps, self._is_done = trainer.global_step, False

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._is_done or trainer.global_step == self._num_steps:
            return
        self._num_steps = trainer.global_step
        self._ends.append(perf_counter())
        if len(self._ends) == _LAST:
            self._report(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_done:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        self._is_done = True
        ends = self._ends[_FIRST - 2 :]
        seconds = [end - begin for begin, end in pairwise(ends)]
        time = self._planned.time
        if len(seconds) < _FEWEST or time is None:
            return
        measured = median(seconds)
        metrics = {
            "plan/step_ms": 1e3 * measured,
            "plan/step_ms_predicted": 1e3 * time.total,
            "plan/step_ms_error": time.total / measured - 1,
            "plan/peak_mib_predicted": (self._planned.peak or 0) / 2**20,
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logging_step(trainer))
