"""Record some training steps with torch's profiler, on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

from lightning_dist.plugins.loggers.mlflow import MLflowLogger

__all__ = ["ProfileSteps"]

_NUM_ROWS = 10
_WIDTH = 60


class ProfileSteps(Callback):
    """Record optimizer steps with torch's profiler, and write one Chrome trace per rank.

    When the last of the steps has ended, rank 0 prints where the traces are, and the operators that took most time. An
    :class:`~lightning_dist.plugins.loggers.MLflowLogger` gets the traces of its machine as artifacts under
    ``profile/``.

    Args:
        first: Index of the first step to record, from 0.
        end: Index of the step before which the recording ends. All recorded steps are in the memory of the process
            until then.
        folder: Folder of the traces, ``rank0.json.gz`` and so on; None: ``profile`` in the run's folder.

    Raises:
        MisconfigurationException: If there is no step between ``first`` and ``end``; when the fit starts, if it ends
            before ``end``.
    """

    def __init__(self, first: int, end: int, folder: str | os.PathLike[str] | None = None) -> None:
        if not 0 <= first < end:
            raise MisconfigurationException(
                f"ProfileSteps(first={first}, end={end}): expected 0 <= first < end, such as first=10, end=13 for steps"
                " 10, 11 and 12."
            )
        self.first = first
        self.end = end
        self.folder = folder
        self._profiler: profile | None = None
        self._traces = Path()
        self._global_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = trainer.estimated_stepping_batches
        if last < self.end:
            raise MisconfigurationException(
                f"The steps {self.first}:{self.end} are to be profiled, but the run ends before step {last:.0f}: choose"
                f" earlier steps, or increase trainer.max_steps={trainer.max_steps} or"
                f" trainer.max_epochs={trainer.max_epochs}."
            )
        if trainer.global_step > self._warm_up:
            raise MisconfigurationException(
                f"The steps {self.first}:{self.end} are to be profiled, but the run resumes at step"
                f" {trainer.global_step}: choose steps from {trainer.global_step + 1} on."
            )
        self._traces = Path(trainer.strategy.broadcast(self.folder or _run_folder(trainer)))

    @property
    def _warm_up(self) -> int:
        """Return the step at which the profiler starts: the first step with it is slower, and is not recorded."""
        return max(self.first - 1, 0)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._global_step = trainer.global_step
        if self._profiler is None and self._global_step == self._warm_up:
            on_cuda = [ProfilerActivity.CUDA] if trainer.strategy.root_device.type == "cuda" else []
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *on_cuda],
                schedule=schedule(wait=0, warmup=self.first - self._warm_up, active=self.end - self.first, repeat=1),
                on_trace_ready=lambda profiler: self._write(profiler, trainer.global_rank),
            )
            self._profiler.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profiler is None or trainer.global_step == self._global_step:
            return
        self._profiler.step()
        if trainer.global_step >= self.end > self._global_step:
            self._finish(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, profiler: profile, rank: int) -> None:
        self._traces.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._traces / f"rank{rank}.json.gz"))

    def _finish(self, trainer: Trainer) -> None:
        """Report the traces, which all ranks have written. This is a collective over all processes."""
        assert self._profiler is not None
        table = _table(self._profiler, self.end - self.first) if trainer.is_global_zero else ""
        if dist.is_available() and dist.is_initialized():
            trainer.strategy.barrier("traces")
        rank_zero_info(
            f"{table}\nTraces of steps {self.first} to {self.end - 1}: {os.path.relpath(self._traces)}/rank*.json.gz\n"
            "  Open one at https://ui.perfetto.dev or at chrome://tracing."
        )
        for logger in trainer.loggers:
            if isinstance(logger, MLflowLogger):
                logger.log_folder(self._traces, "profile")


def _run_folder(trainer: Trainer) -> str:
    # trainer.log_dir is the folder of all runs of an MLflowLogger.
    return os.path.join(getattr(trainer.logger, "log_dir", None) or trainer.default_root_dir, "profile")


def _table(profiler: profile, num_steps: int) -> str:
    """Return the operators that took most time by themselves on this rank's device, as lines of text."""
    on_device = ProfilerActivity.CUDA in profiler.activities
    times = [
        ((event.self_device_time_total if on_device else event.self_cpu_time_total) / 1000, event)
        for event in profiler.key_averages()
        if not event.key.startswith("ProfilerStep")
    ]
    total = sum(milliseconds for milliseconds, _ in times) or 1.0
    lines = [f"{'operator (rank 0)':<{_WIDTH}}{'calls/step':>11}{'ms/step':>10}{'share':>8}"]
    for milliseconds, event in sorted(times, key=lambda timed: -timed[0])[:_NUM_ROWS]:
        name = event.key if len(event.key) < _WIDTH else f"{event.key[: _WIDTH - 4]}..."
        lines.append(
            f"{name:<{_WIDTH}}{event.count / num_steps:>11.1f}{milliseconds / num_steps:>10.2f}"
            f"{milliseconds / total:>8.1%}"
        )
    return "\n".join(lines)
