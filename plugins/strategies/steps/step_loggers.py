"""Keep a step that runs on fake tensors from writing made-up values to loggers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment

from lightning_dist.tracing.step_graph import TraceError

__all__ = ["SilentLoggers", "without_loggers"]

_WRITES = (
    "after_save_checkpoint", "finalize", "log_audio", "log_graph", "log_hyperparams", "log_image", "log_metrics",
    "log_table", "log_text", "log_video", "save", "watch",
)  # fmt: skip
"""Names of methods by which Lightning's loggers write."""


class SilentLoggers:
    """Hold copies of loggers, of the same classes, that write nothing.

    Args:
        loggers: The loggers of a Trainer, which are left unchanged.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        self.loggers = [self._silent(logger) for logger in loggers]
        self.refuses = False
        """Whether it is an error to use the copies."""

    def _silent(self, logger: Logger) -> Logger:
        def ignore(*args: Any, **kwargs: Any) -> None:
            self._check(type(logger).__name__)

        def experiment(silent: Logger) -> DummyExperiment:
            self._check(type(logger).__name__)
            return DummyExperiment()

        members = {name: ignore for name in _WRITES if hasattr(type(logger), name)}
        cls = type(type(logger).__name__, (type(logger),), {**members, "experiment": property(experiment)})
        silent: Logger = object.__new__(cls)  # A real copy could connect to a server.
        vars(silent).update(vars(logger))
        return silent

    def _check(self, name: str) -> None:
        if self.refuses:
            raise TraceError(
                f"The step uses the {name} itself (self.logger). Under a pipeline the end of a step runs on the last"
                " stage alone, where loggers do not write, and once for each microbatch: nothing would be logged. Use"
                " self.log, or return what is to be logged and write it in a hook such as on_train_batch_end."
            )


@contextmanager
def without_loggers(trainer: Trainer) -> Iterator[SilentLoggers]:
    """Replace the loggers of ``trainer`` in this context by copies that write nothing."""
    loggers = list(trainer.loggers)
    silent = SilentLoggers(loggers)
    trainer.loggers = silent.loggers
    try:
        yield silent
    finally:
        trainer.loggers = loggers
