"""Hooks of the module and of callbacks under a pipeline: they see the parameters of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateFinder, ModelSummary, ProgressBar, WeightAveraging

from lightning_dist.pipeline import AllStages

__all__ = ["HooksOfAllStages"]

_RUNS = ("train", "validation", "test", "predict")
_HOOKS = (
    *(f"on_{run}_{when}" for run in _RUNS for when in ("start", "end")),
    *(f"on_{run}_{part}_{when}" for run in _RUNS for part in ("epoch", "batch") for when in ("start", "end")),
    "configure_gradient_clipping", "on_after_backward", "on_before_backward", "on_before_optimizer_step",
    "on_before_zero_grad", "on_fit_end", "on_fit_start", "on_sanity_check_end", "on_sanity_check_start",
)  # fmt: skip
"""Hooks that run outside of steps."""

_OWN_WAYS = (Checkpoint, LearningRateFinder, ModelSummary, ProgressBar, WeightAveraging)
"""Callbacks that work on each rank's own parameters, or on none, or run steps."""


class HooksOfAllStages:
    """Lets hooks that a user has written look at, and change, the parameters of all stages.

    Args:
        module: The user's module.
        all_stages: What runs code on the parameters of all stages.
    """

    def __init__(self, module: LightningModule, all_stages: AllStages) -> None:
        self._module = module
        self._all_stages = all_stages
        self._replaced: list[tuple[Any, str]] = []

    def install(self, trainer: Trainer) -> None:
        """Replace the hooks of the module and of the callbacks of ``trainer``, until :meth:`remove`."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        users = [callback for callback in callbacks if not isinstance(callback, _OWN_WAYS) and not _is_ours(callback)]
        for owner, base in ((self._module, LightningModule), *((callback, Callback) for callback in users)):
            for name in _HOOKS:
                own = getattr(type(owner), name, None)
                if own is not None and own is not getattr(base, name, None) and name not in vars(owner):
                    vars(owner)[name] = self._seeing_all(getattr(owner, name), f"{type(owner).__name__}.{name}")
                    self._replaced.append((owner, name))

    def remove(self) -> None:
        """Give the module and the callbacks their hooks back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()

    def _seeing_all(self, own: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(own)
        def hook(*args: Any, **kwargs: Any) -> Any:
            with self._all_stages.around(what), self._logging_whole():
                return own(*args, **kwargs)

        return hook

    @contextmanager
    def _logging_whole(self) -> Iterator[None]:
        """Let ``self.log`` be given values that all ranks have."""
        if "log" in vars(self._module):
            yield
            return

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            type(self._module).log(self._module, name, self._all_stages.whole(value), *args, **kwargs)

        vars(self._module)["log"] = log
        try:
            yield
        finally:
            vars(self._module).pop("log", None)


def _is_ours(callback: Callback) -> bool:
    return type(callback).__module__.startswith("lightning_dist.")
