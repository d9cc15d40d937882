"""Compare the prediction of a run's memory and time with what the run needs."""

from __future__ import annotations

import warnings
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.plugins._compat import logging_step
from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.planning.plan import predict
from lightning_dist.plugins.planning.planned import Planned
from lightning_dist.plugins.planning.trained import Trained
from lightning_dist.plugins.planning.where import find_where
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.run.doctor.profile import MachineProfile

__all__ = ["PredictionReport"]

_FIRST, _LAST, _FEWEST = 3, 20, 5
"""The first and the last optimizer step that are measured, and the smallest number of them."""


class PredictionReport(Callback):
    """Predict the memory and the time of a training step, and log them beside the measured ones.

    Rank 0 predicts them before the processes of a fit communicate, by a dry run of its own layout, which takes some
    seconds. They are printed then, and logged once in a training, after 20 optimizer steps or at its end. It needs a
    strategy of this project. With ``strategy="auto_parallel"``, the prediction is that of the plan, and the callback is
    there without being asked for.

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
        profile: File with measured figures of the machines, from ``lightning-dist doctor --write``. None: operations
            are measured on the device of rank 0, and the speed of links is assumed.
        planned: A prediction that was made already; None: it is made when a fit begins.

    Raises:
        ValueError: If the file of ``profile`` is none.
        OSError: If it cannot be read.
    """

    def __init__(self, profile: str | None = None, planned: Planned | None = None) -> None:
        self._profile = None if profile is None else MachineProfile.read(profile)
        self._given = planned
        self._planned = planned
        self._ends: list[float] = []
        self._num_steps = 0
        self._is_done = False

    def use(self, planned: Planned) -> None:
        """Take the prediction of a plan, and make none."""
        self._given = self._planned = planned

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that do not call :meth:`before_processes`.

        Raises:
            MisconfigurationException: If the strategy is none of this project.
        """
        if not isinstance(trainer.strategy, MeshStrategy):
            raise MisconfigurationException(
                f"PredictionReport with {type(trainer.strategy).__name__}: it predicts runs of strategies of this"
                " project, such as strategy='data_parallel'. Use one of them, or leave the callback out."
            )

    def before_processes(self, trainer: Trainer) -> None:
        """Predict what the run of ``trainer`` needs, on rank 0, and print it. If this fails, a warning says why."""
        strategy = trainer.strategy
        self._planned = self._given  # The last fit may have had another strategy.
        is_first = trainer.node_rank == 0 and trainer.local_rank == 0
        if self._planned is not None or trainer.state.fn != TrainerFn.FITTING or not is_first:
            return
        if not isinstance(strategy, MeshStrategy) or strategy.chooses_layout:  # The plan gives its prediction later.
            return
        try:
            planned = self._predict(strategy)
        except Exception as error:
            planned = Planned(_layout_of(strategy), why_not=f"{type(error).__name__}: {error}")
        if planned.peak is None:
            warnings.warn(f"PredictionReport: this run cannot be predicted: {planned.why_not}", stacklevel=2)
            return
        self._planned = planned
        rank_zero_info(_table(planned))

    def _predict(self, strategy: MeshStrategy) -> Planned:
        backend = "gloo" if strategy.root_device.type == "cpu" else "nccl"
        where = find_where(strategy.num_processes, backend, None, self._profile)
        trained = Trained.of(strategy, strategy.arguments)
        return predict(trained, _layout_of(strategy), backend, where, strategy.num_processes)

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
        planned = self._planned
        if len(seconds) < _FEWEST or planned is None or planned.time is None:
            return
        time = planned.time
        measured = median(seconds)
        metrics = {
            "plan/step_ms": 1e3 * measured,
            "plan/step_ms_predicted": 1e3 * time.total,
            "plan/step_ms_error": time.total / measured - 1,
            "plan/peak_mib_predicted": (planned.peak or 0) / 2**20,
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logging_step(trainer))


def _layout_of(strategy: MeshStrategy) -> Layout:
    layout = strategy.layout
    sizes = {axis: layout.sizes[axis] for axis in Layout().sizes}
    return Layout(**sizes, options=(("ep_size", layout.ep),) if layout.ep > 1 else ())


def _table(planned: Planned) -> str:
    """Return what is predicted for a rank, as text."""
    peak, resident = (planned.peak or 0) / 2**20, (planned.resident or 0) / 2**20
    lines = [
        "prediction for a rank, by a dry run",
        f"  tensors between two steps       {resident:>11,.1f} MiB",
        f"  more of them within a step      {peak - resident:>11,.1f} MiB: activations, gradients and communication",
        f"  peak                            {peak:>11,.1f} MiB",
    ]
    if time := planned.time:
        sending = sum(time.communication.values())
        parts = {
            "compute": time.compute,
            "sending": sending,
            "pipeline bubble": time.bubble,
            "optimizer": time.optimizer,
            "host": time.host,
        }
        shown = ", ".join(f"{name} {1e3 * seconds:,.1f}" for name, seconds in parts.items() if seconds)
        lines.append(f"  time of a step                  {1e3 * time.total:>11,.1f} ms: {shown}")
        lines.append(f"  devices and links: {time.source}")
    return "\n".join(lines)
