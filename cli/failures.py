"""Report how a run failed: by a mistake in its configuration, in training, or because another process failed."""

import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from lightning_dist.checkpoint import CheckpointError
from lightning_dist.cli._compat import child_processes
from lightning_dist.cli.errors import (
    BAD_CONFIGURATION,
    SHOW_TRACEBACK,
    TRAINING_FAILED,
    report,
    reported_by_another,
    users_line,
)
from lightning_dist.cli.messages import interpolation, original
from lightning_dist.mesh.consensus import is_consequence

_USER_MISTAKES = (
    ValueError,
    MisconfigurationException,
    ModuleNotFoundError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    CheckpointError,
    OmegaConfBaseException,
)
_SECONDS_TO_EXIT = 5


class Progress(Callback):
    """Record whether a run has reached its first batch. Earlier errors count as mistakes in its configuration.

    The batches of the sanity check count only while it runs: Lightning prepares the training after it, and refuses
    there, for example, a batch size that cannot be divided.
    """

    def __init__(self) -> None:
        self.batch_seen = False
        self.trainer: Trainer | None = None

    def stop_other_processes(self) -> None:
        """End the processes that this one has launched, because they would wait for it in a collective."""
        processes = [] if self.trainer is None else child_processes(self.trainer)
        deadline = time.monotonic() + _SECONDS_TO_EXIT
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.05)
        for process in processes:
            process.send_signal(signal.SIGKILL)

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self._see_batch()

    @override
    def on_validation_batch_start(self, *args: Any) -> None:
        self._see_batch()

    @override
    def on_test_batch_start(self, *args: Any) -> None:
        self._see_batch()

    @override
    def on_predict_batch_start(self, *args: Any) -> None:
        self._see_batch()

    @override
    def on_sanity_check_end(self, *args: Any) -> None:
        self.batch_seen = False

    def _see_batch(self) -> None:
        self.batch_seen = True
        assert self.trainer is not None
        if self.trainer.sanity_checking:
            return
        # The callback is not needed any more, and every callback costs time in every step. The list is replaced and not
        # changed, because Lightning is iterating over it.
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        self.trainer.callbacks = [callback for callback in callbacks if callback is not self]  # type: ignore[attr-defined]


def report_failure(error: Exception, progress: Progress) -> int:
    """Print why a run failed, unless another process prints it.

    Args:
        error: The exception that the run raised.
        progress: The callback that knows whether the run had reached its first batch.

    Returns:
        The exit code: 2 for a mistake in the configuration, else 1; or that of another process, which prints the
        failure.
    """
    error = original(error)
    if is_consequence(error):
        code = reported_by_another()
        if code is not None:
            return code
    is_mistake = not progress.batch_seen and (
        isinstance(error, _USER_MISTAKES) or _is_rejected_argument(error, progress)
    )
    if is_mistake and not os.environ.get(SHOW_TRACEBACK):
        return report(_describe(error), BAD_CONFIGURATION)
    text = "".join(traceback.format_exception(error))
    code = BAD_CONFIGURATION if is_mistake else TRAINING_FAILED
    # The tracebacks differ between the launching process and the launched ones, so they cannot identify the error.
    return report(text, code, prefix="", cause=f"{type(error).__name__}: {error}")


def _is_rejected_argument(error: Exception, progress: Progress) -> bool:
    """Return whether the Trainer's constructor rejected a value by a TypeError, as it does for ``devices``."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_by_lightning = bool(frames) and "lightning" in Path(frames[-1].filename).parts
    return isinstance(error, TypeError) and progress.trainer is None and raised_by_lightning


def _describe(error: Exception) -> str:
    if isinstance(error, OmegaConfBaseException):
        return interpolation(error)
    return (str(error) or type(error).__name__) + users_line(error)
