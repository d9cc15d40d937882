"""Derive the arguments of the two Trainers of a check from those of the user's Trainer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import Precision

from lightning_dist.plugins.callbacks import LoadPretrained

__all__ = ["Settings"]

_LEFT_OUT = (
    "barebones", "check_val_every_n_epoch", "fast_dev_run", "max_time", "min_epochs", "min_steps", "profiler",
    "val_check_interval",
)  # fmt: skip
"""Arguments that have no meaning for a few steps without validation."""

_DISTRIBUTES = ("devices", "limit_train_batches", "num_nodes", "overfit_batches", "strategy", "sync_batchnorm")
"""Arguments that one process on recorded batches does not need."""

_WITHOUT_OUTPUT: dict[str, Any] = {
    "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_autolog_hparams": False, "limit_val_batches": 0, "num_sanity_val_steps": 0,
}  # fmt: skip

_OF_LIGHTNING = ("64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")


class Settings:
    """Hold the arguments of the Trainers of a check.

    Callbacks and loggers of the user are left out, except callbacks that determine what is trained.

    Args:
        given: Arguments of the user's Trainer.
        float64: Whether to compute in float64 instead of the given precision.
    """

    def __init__(self, given: Mapping[str, Any], float64: bool) -> None:
        self._arguments = {name: value for name, value in given.items() if name not in (*_LEFT_OUT, "callbacks")}
        # With a dummy, steps can use self.logger as in a fit.
        logger = DummyLogger() if self._arguments.get("logger", True) else False
        self._arguments |= {**_WITHOUT_OUTPUT, "logger": logger}
        if float64:
            self._arguments |= {"precision": "64-true", "plugins": self._plugins_without_precision()}
        callbacks = given.get("callbacks") or []
        self._callbacks: list[Callback] = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]

    def _plugins_without_precision(self) -> list[Any]:
        plugins = self._arguments.get("plugins") or []
        plugins = list(plugins) if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]
        return [plugin for plugin in plugins if not isinstance(plugin, Precision)]

    @property
    def callbacks_left_out(self) -> list[str]:
        """Return the names of the classes of the callbacks that do not take part."""
        return [type(callback).__name__ for callback in self._callbacks if not _takes_part(callback)]

    def under_strategy(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that runs the strategy."""
        strategy = self._arguments.get("strategy", "auto")
        return {
            **self._arguments,
            "strategy": strategy() if callable(strategy) else strategy,
            "callbacks": [callback for callback in self._callbacks if _takes_part(callback)],
        }

    def copies_for_one_process(self) -> list[Callback]:
        """Return copies of the callbacks that take part in one process, before the run under the strategy uses them.

        Pretrained weights are not loaded again, because one process gets the initial weights of the run.
        """
        return [copy.deepcopy(callback) for callback in self._callbacks if isinstance(callback, BaseFinetuning)]

    def in_one_process(self, precision: str) -> dict[str, Any]:
        """Return the arguments of the Trainer of one process, without callbacks and strategy.

        Args:
            precision: Precision of the run under the strategy.

        Raises:
            ValueError: If one process cannot compute in the precision.
        """
        if precision not in _OF_LIGHTNING:
            raise ValueError(
                f"precision={precision!r} exists only under the strategies, so that one process cannot be compared in"
                f" it: compare in float64, or in one of {', '.join(_OF_LIGHTNING)}."
            )
        own = {name: value for name, value in self._arguments.items() if name not in _DISTRIBUTES}
        return {**own, "precision": precision, "plugins": self._plugins_without_precision()}


def _takes_part(callback: Callback) -> bool:
    return isinstance(callback, BaseFinetuning | LoadPretrained)
