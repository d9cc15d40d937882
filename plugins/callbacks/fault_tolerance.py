"""Save and stop a run on a signal, and end runs that hang."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_dist.mesh.consensus import raise_on_all_ranks
from lightning_dist.mesh.preemption import EXIT_STOPPED, StopRequest, TrainingStopped
from lightning_dist.plugins import _compat
from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.run.watchdog import Watchdog

__all__ = ["STOPPED", "FaultTolerance", "shown_path"]

STOPPED = "last-stopped.ckpt"
"""Name of the checkpoint of a stopped run, which is saved beside the checkpoints of its first ModelCheckpoint."""


class FaultTolerance(Callback):
    """Save and stop a run on SIGTERM or SIGUSR1, and end a run that hangs.

    A signal may reach one, several or all processes. The ranks agree on it between two batches of training or of
    validation. Then the run saves ``last-stopped.ckpt`` beside the checkpoints of its first ModelCheckpoint, and all
    processes exit with code 75. ``ckpt_path="auto"`` or ``"last"`` resumes from there within the epoch; a validation
    that was interrupted starts again. Under SLURM, the requeue signal saves to the path at which Lightning looks after
    a requeue, and requeues the job.

    This project's strategies add this callback to every fit that has none.

    Args:
        grace_seconds: Seconds after the signal within which the checkpoint must be saved. Otherwise the run exits with
            code 1, and only the earlier checkpoints remain.
        hang_timeout: Seconds without a batch after which a run is ended. A process on every node then reports which
            rank hangs and in which collective the others wait for it, writes every rank's stacks and collectives to the
            logger's artifacts and to ``<default_root_dir>/watchdog``, and ends the node's processes with code 76, so
            that torchrun restarts them. The timeout must be longer than the longest step, compilation, validation batch
            or synchronous save. None: there is no watchdog, and the strategy's ``timeout`` ends processes that wait in
            a collective, without a report.

    Raises:
        MisconfigurationException: If a number is not positive.
    """

    def __init__(self, grace_seconds: float = 30.0, hang_timeout: float | None = None) -> None:
        if not grace_seconds > 0:
            raise MisconfigurationException(f"FaultTolerance(grace_seconds={grace_seconds}): expected more than 0.")
        if hang_timeout is not None and not hang_timeout > 0:
            raise MisconfigurationException(
                f"FaultTolerance(hang_timeout={hang_timeout}): expected more than 0 seconds, or None for no watchdog."
            )
        self.grace_seconds = grace_seconds
        self.hang_timeout = hang_timeout
        self._stop = StopRequest()
        self._watchdog: Watchdog | None = None
        self._num_beats = 0
        self._looks_within_validation = False
        self._folder: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _compat.leave_signals_alone(trainer)
        if stage == "fit":
            # Lightning later gives checkpoint callbacks without a dirpath a folder that differs from run to run.
            given = [callback.dirpath for callback in _model_checkpoints(trainer) if callback.dirpath]
            self._folder = str(given[0]) if given else None
            requeue = _compat.requeue_signal(trainer)
            signals = {signal.SIGTERM, signal.SIGUSR1} | ({requeue} if requeue else set())
            # Between two exchanges of flags, a rank may save for longer than a collective of a step may take.
            self._stop = StopRequest(signals, max(_timeout(trainer), default_pg_timeout))
            self._stop.listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _compat.around_every_batch(trainer, "stop request", lambda: self._between_batches(trainer))
        if self.hang_timeout is not None:
            self._watch(trainer, self.hang_timeout)
        self._beat()

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self._beat()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # If ranks have unequal numbers of batches, a rank with more of them would wait for an agreement in which the
        # others do not take part.
        is_of_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        self._looks_within_validation = is_of_fit and _compat.validates_alike(trainer)

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._beat()
        if self._looks_within_validation:
            self._stop_if_asked(trainer)

    @override
    def on_validation_end(self, *args: Any) -> None:
        self._beat()

    @override
    def on_train_end(self, *args: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.disarm()  # The last save may take longer than the timeout.

    @override
    def on_exception(self, *args: Any) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _between_batches(self, trainer: Trainer) -> None:
        self._beat()
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        number = self._stop.agreed()
        if number:
            self._save_and_stop(trainer, number)

    def _save_and_stop(self, trainer: Trainer, number: int) -> None:
        """Save, and end the fit with TrainingStopped, because of the signal ``number``. This is a collective."""
        left = max(self.grace_seconds - self._stop.seconds_since, 0.0)
        timer = threading.Timer(left, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            if self._watchdog is not None:
                self._watchdog.disarm()
            must_requeue = number == _compat.requeue_signal(trainer)
            # Lightning numbers its checkpoints by the files in the folder, which the ranks may see differently.
            path = trainer.strategy.broadcast(
                _compat.path_after_requeue(trainer) if must_requeue else stop_path(trainer, self._folder)
            )
            if trainer.validating:
                _compat.put_training_weights_back(trainer)
            trainer.save_checkpoint(path, weights_only=False)
            wait = getattr(trainer.strategy, "wait_for_checkpoints", None)
            if wait is not None:
                wait()
        finally:
            timer.cancel()
        rank_zero_info(
            f"Stopped by {signal.Signals(number).name} after step {trainer.global_step}; saved {shown_path(path)}, from"
            f" which ckpt_path={shown_path(path)} resumes. Exit code {EXIT_STOPPED}: stopped on request, and saved."
        )
        if must_requeue and trainer.is_global_zero:
            _requeue()
        _compat.let_children_exit(trainer)
        trainer.strategy.barrier("stopped")
        raise TrainingStopped(path)

    def _give_up(self) -> None:
        print(
            f"lightning-dist: the checkpoint was not written within grace_seconds={self.grace_seconds:g} after the"
            " signal. The earlier checkpoints are unchanged.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _beat(self) -> None:
        if self._watchdog is not None:
            self._num_beats += 1
            self._watchdog.beat(self._num_beats)

    def _watch(self, trainer: Trainer, timeout_s: float) -> None:
        limit_s = _timeout(trainer).total_seconds()
        if timeout_s >= limit_s and trainer.world_size > 1:
            rank_zero_warn(
                f"FaultTolerance(hang_timeout={timeout_s:g}) with the strategy's timeout of {limit_s:g} s: a collective"
                " fails, and with NCCL ends its process, before the watchdog reports why. Set hang_timeout below"
                " timeout."
            )
        name = trainer.strategy.broadcast(uuid.uuid4().hex)
        folder = Path(trainer.default_root_dir) / "watchdog" / name[:8]
        num_processes: int = getattr(trainer.strategy, "num_processes", 1)
        self._watchdog = Watchdog(
            folder,
            timeout_s,
            trainer.global_rank,
            trainer.local_rank,
            num_processes,
            f"{name}-{trainer.node_rank}",
            on_hang=lambda report: _upload(trainer, folder),
        )
        with raise_on_all_ranks("starting the watchdog"):
            self._watchdog.start()

    def _close(self) -> None:
        self._stop.close()
        self._looks_within_validation = False
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None


def _timeout(trainer: Trainer) -> timedelta:
    """Return the time for which the strategy lets ranks wait for each other in a collective."""
    return getattr(trainer.strategy, "timeout", None) or default_pg_timeout


def shown_path(path: str) -> str:
    """Return a path as users are shown it: relative to the working directory, unless it is a URL."""
    return path if "://" in path else os.path.relpath(path)


def stop_path(trainer: Trainer, folder: str | None = None) -> str:
    """Return the path or URL of the checkpoint that a stopped run saves.

    Args:
        trainer: The Trainer of the run.
        folder: The first folder that the user has given a ModelCheckpoint; None: the user has given none.
    """
    folders = [folder, *(callback.dirpath for callback in _model_checkpoints(trainer)), trainer.default_root_dir]
    return os.path.join(next(str(found) for found in folders if found), STOPPED)


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _upload(trainer: Trainer, folder: Path) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, MLflowLogger) and trainer.is_global_zero:
            logger.log_folder(folder, "watchdog")


def _requeue() -> None:
    """Ask SLURM to queue this job again."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        rank_zero_warn(f"The job {job} is not requeued: there is no scontrol here. Requeue it by hand.")
        return
    result = subprocess.run([scontrol, "requeue", job], capture_output=True, text=True, check=False)
    if result.returncode:
        rank_zero_warn(f"The job {job} is not requeued: scontrol says {result.stderr.strip()}")
    else:
        rank_zero_info(f"Requeued the job {job}.")
