"""Save Lightning's checkpoint dictionary with the engine's writer, and report the outcome to Lightning."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_dist.checkpoint import CheckpointError, Manifest, Save, Snapshot, Verify, Writer, find, take_snapshot
from lightning_dist.checkpoint.state import by_name
from lightning_dist.mesh.consensus import raise_on_all_ranks
from lightning_dist.parameters.on_use import call_before_writes
from lightning_dist.plugins.strategies.bookkeeping import Bookkeeping, absolute
from lightning_dist.plugins.strategies.logged_runs import runs_of
from lightning_dist.plugins.strategies.retention import Retention

__all__ = ["CheckpointOptions", "Checkpoints", "optimizer_state"]


@dataclass(frozen=True)
class CheckpointOptions:
    """Configure how a strategy saves and loads checkpoints.

    Args:
        asynchronous: Whether to write in the background, so that a training step waits only until the weights are
            copied. If False, it waits until they are on the disk.
        verify: Extent of the check before a checkpoint is loaded: ``"full"`` (sizes and digests of all files),
            ``"size"`` (sizes only) or ``"off"``.
        weights_only: Whether to refuse to load pickled objects other than tensors and plain values, as torch.load does.
            ``fit(weights_only=...)`` takes precedence.
        keep_last: Number of the run's newest checkpoints that are kept, even if no ModelCheckpoint wants them any
            more. Older ones are removed, unless a ModelCheckpoint has them among its best ones or as its last one.
            None: the callbacks alone decide.
        keep_every_n_steps: Checkpoints at a multiple of this number of optimizer steps are always kept. None: no
            checkpoint is kept for its step.

    Raises:
        ValueError: If ``verify`` has none of its values, or ``keep_last`` or ``keep_every_n_steps`` is less than 1.
    """

    asynchronous: bool = True
    verify: Verify = "full"
    weights_only: bool = True
    keep_last: int | None = None
    keep_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        if self.verify not in ("full", "size", "off"):
            raise ValueError(f"checkpoint.verify={self.verify!r} must be 'full', 'size' or 'off'.")
        Retention(self.keep_last, self.keep_every_n_steps)

    @classmethod
    def of(cls, given: CheckpointOptions | Mapping[str, Any] | None) -> CheckpointOptions:
        """Return the options that a strategy was given, which may be a dictionary of them.

        Args:
            given: The options, or a dictionary of some of them; None: the defaults.

        Raises:
            TypeError: If the dictionary has an unknown option, or ``given`` is of another type.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise TypeError(f"checkpoint={given!r}: give CheckpointOptions, or a dictionary of {', '.join(names)}.")
        for name in given.keys() - set(names):
            near = get_close_matches(name, names, 1, 0.4)
            meant = f" did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"checkpoint={dict(given)!r} has no option {name!r};{meant} It has {', '.join(names)}.")
        return cls(**given)


def optimizer_state(optimizer: Optimizer, module: LightningModule) -> dict[str, Any]:
    """Return the state of ``optimizer``, keyed by the parameters' full names.

    Args:
        optimizer: A torch optimizer, or Lightning's wrapper around one.
        module: The LightningModule whose parameters it optimizes.
    """
    return by_name(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer, module)


class Checkpoints:
    """Save and remove the checkpoints of a strategy's runs.

    Args:
        options: Options that say how checkpoints are saved and which are kept.
        timeout: The time for which ranks wait for each other within a save; None: torch's default.
    """

    def __init__(self, options: CheckpointOptions, timeout: timedelta | None) -> None:
        self._options = options
        self._writer = Writer(timeout)
        self._bookkeeping = Bookkeeping()
        self._retention = Retention(options.keep_last, options.keep_every_n_steps)
        self._folders: set[str] = set()
        self._saved: set[str] = set()
        self._resumed: str | None = None
        self._run = uuid.uuid4().hex
        self._trainer: Trainer | None = None
        self._newest_error: CheckpointError | None = None
        self._num_failed = 0
        call_before_writes(self.before_update)  # A step may write into shards that are being copied.
        self._failed: list[str] = []  # These are the failed saves that the retention has not rolled back yet.

    def start(self, trainer: Trainer) -> None:
        """Begin to save the checkpoints of ``trainer``."""
        self._trainer = trainer
        self._newest_error = None
        if trainer.state.fn == TrainerFn.FITTING:
            self._bookkeeping.start(trainer)

    def save(
        self,
        checkpoint: Mapping[str, Any],
        own: Callable[[], Mapping[str, Any]],
        path: str,
        settings: Mapping[str, Any],
    ) -> None:
        """Save Lightning's ``checkpoint`` and each rank's own state at ``path``.

        This is a collective over all processes.

        Args:
            checkpoint: Lightning's checkpoint dictionary, which ``own`` may change before it is written.
            own: Function without arguments that returns this rank's own state.
            path: Absolute path or URL of the checkpoint.
            settings: How the run trains: the settings of the strategy and of techniques, as plain JSON.

        Raises:
            CheckpointError: If it cannot be written outside of a fit. A fit goes on, and :meth:`finish` raises the
                error if the last save failed.
        """
        start = time.perf_counter()
        self.finish_pending()
        step = int(checkpoint.get("global_step", 0))
        about = {"global_step": step, "epoch": checkpoint.get("epoch"), "run": self._run, "settings": settings}
        if self._trainer is not None:
            about |= runs_of(self._trainer)
        asynchronous = self._is_fitting and self._options.asynchronous
        snapshot: Snapshot | Exception
        try:
            snapshot = take_snapshot(checkpoint, own(), about)
        except Exception as error:  # It may concern this rank alone, so the writer lets the save fail on all ranks.
            snapshot = error
        save = self._writer.save(path, snapshot, asynchronous)
        self._bookkeeping.asked_to_save(path)
        self._saved.add(path)
        self._retain(path, step)
        save.stall_s = time.perf_counter() - start
        if not self._is_fitting:
            self.finish_pending()
            self._writer.close()
            self._raise_newest_error()

    def is_own(self, path: str) -> bool:
        """Return whether this process took part in writing the checkpoint ``path``, and therefore knows its content."""
        return path in self._saved

    @property
    def _is_fitting(self) -> bool:
        state = self._trainer.state if self._trainer is not None else None
        return state is not None and state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    def go_on_from(self, path: str, manifest: Manifest) -> None:
        """Continue the run that saved the checkpoint at ``path``, so that the retention covers its checkpoints."""
        self._run = manifest.about.get("run", self._run)
        self._resumed = path

    def newest(self) -> tuple[str, Manifest] | None:
        """Return the path and the manifest of the newest complete checkpoint that this run has saved or resumed.

        The directories are read, so that a save that is under way or has failed does not count. This is no collective.
        """
        own = {*self._saved} if self._resumed is None else {*self._saved, self._resumed}
        newest: tuple[str, Manifest] | None = None
        for folder in sorted({os.path.dirname(path) for path in own}):
            for path, manifest in find(folder):
                if isinstance(manifest, Manifest) and absolute(path) in own:
                    newest = newest if newest and newest[1].saved_at > manifest.saved_at else (path, manifest)
        return newest

    def remove(self, path: str) -> None:
        """Remove the checkpoint at ``path`` if the previous save succeeds, unless the retention keeps it.

        All ranks must call this.
        """
        if not self._retention.keeps(path):
            self._remove(path)

    def _remove(self, path: str) -> None:
        self._bookkeeping.asked_to_remove(path)
        self._retention.asked_to_remove(path)
        self._saved.discard(path)
        self._writer.remove(path)

    def _retain(self, path: str, step: int) -> None:
        """Remove the checkpoints that the options no longer keep once ``path`` is saved at ``step``."""
        if not self._retention.is_on or self._trainer is None:
            return
        folder = os.path.dirname(path)
        if folder not in self._folders:
            self._folders.add(folder)
            before: dict[str, int] = {}
            with raise_on_all_ranks(f"looking for checkpoints in {folder}"):
                if self._trainer.is_global_zero:
                    before = self._saved_before(folder)
            self._retention.found(self._trainer.strategy.broadcast(before))
        self._retention.asked_to_save(path, step)
        for surplus in self._retention.surplus({path, *self._bookkeeping.wanted}):
            self._remove(surplus)

    def _saved_before(self, folder: str) -> dict[str, int]:
        """Return the optimizer steps of this run's checkpoints in ``folder``, keyed by absolute path."""
        steps = {}
        for path, manifest in find(folder):
            if isinstance(manifest, Manifest) and manifest.about.get("run") == self._run:
                steps[absolute(path)] = int(manifest.about.get("global_step") or 0)
        return steps

    def before_step(self) -> None:
        """Report the saves that have ended since the last call; call this between steps."""
        for save in self._writer.finished():
            self._report(save)

    def before_update(self) -> None:
        """Wait until the weights are copied, so that the optimizer may change them."""
        self._writer.wait_until_staged()

    def wait(self) -> None:
        """Wait for the last save, after an error that may have occurred on this rank alone."""
        self._writer.wait()

    def finish_pending(self) -> None:
        """Wait for the last save, report it, and roll back the saves that failed. All ranks must call this."""
        self._writer.wait()
        self.before_step()
        for path in self._failed:
            self._retention.failed(path)
        self._failed = []
        for path in self._bookkeeping.roll_back_failed():
            self.remove(absolute(path))

    def finish(self) -> None:
        """Wait for the last save at the end of a fit.

        Raises:
            CheckpointError: If the last save failed.
        """
        self.finish_pending()
        self._raise_newest_error()

    def close(self) -> None:
        """Wait for the pending saves and removals, and end the writer's thread.

        Raises:
            CheckpointError: If the newest checkpoint could not be written, and nothing else has failed. It was saved
                after :meth:`finish`, by a hook that runs at the end of a fit.
        """
        self._writer.close()
        self.before_step()
        self._bookkeeping.close()
        self._trainer = None
        if sys.exc_info()[0] is None:
            self._raise_newest_error()

    def _raise_newest_error(self) -> None:
        error, self._newest_error = self._newest_error, None
        if error is not None:
            raise error

    def _report(self, save: Save) -> None:
        self._newest_error = save.error
        self._bookkeeping.saved(save)
        if save.error is not None:
            self._failed.append(save.path)
            self._num_failed += 1
            rank_zero_warn(f"{save.error} Training goes on; if the last save fails too, it ends with this error.")
        if self._trainer is None or not self._trainer.is_global_zero:
            return
        metrics: dict[str, float] = {"checkpoint/failed": self._num_failed, "checkpoint/stall_ms": 1000 * save.stall_s}
        if save.error is None:
            metrics |= {
                "checkpoint/staging_ms": 1000 * save.staging_s,
                "checkpoint/write_s": save.write_s,
                "checkpoint/mib": save.num_bytes / 2**20,
            }
        for logger in self._trainer.loggers:
            # If a rank could not take a snapshot for a save, the save has no record of its step.
            logger.log_metrics(metrics, save.about.get("global_step", self._trainer.global_step))
