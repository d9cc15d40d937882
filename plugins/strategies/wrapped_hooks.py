"""Run the hooks that the user's module and callbacks define inside a context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
    WeightAveraging,
)

__all__ = ["OUTSIDE_OF_STEPS", "WrappedHooks", "defines_hook"]

_RUNS = ("train", "validation", "test", "predict")

OUTSIDE_OF_STEPS = (
    *(f"on_{run}_{when}" for run in _RUNS for when in ("start", "end")),
    *(f"on_{run}_{part}_{when}" for run in _RUNS for part in ("epoch", "batch") for when in ("start", "end")),
    "configure_gradient_clipping", "on_after_backward", "on_before_backward", "on_before_optimizer_step",
    "on_before_zero_grad", "on_fit_end", "on_fit_start", "on_sanity_check_end", "on_sanity_check_start",
    "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "on_validation_model_zero_grad",
    *(f"on_{run}_model_{mode}" for run in _RUNS[1:] for mode in ("eval", "train")),
)  # fmt: skip
"""Names of the hooks that Lightning calls outside of steps."""

_CALL_MODULES = frozenset(f"on_{run}_model_eval" for run in _RUNS[1:])
"""Hooks whose default calls ``train()`` of all modules, which may change weights there, for example by merging them."""

_NOT_WRAPPED = (BatchSizeFinder, Checkpoint, LearningRateFinder, ModelSummary, ProgressBar, WeightAveraging)
"""Callbacks whose hooks are not wrapped, because they work on each rank's own parameters or on none, or run steps."""


def defines_hook(name: str, owner: object) -> bool:
    """Return whether a module or a callback defines a hook itself, in its class or as an attribute of the instance.

    Unlike Lightning's ``is_overridden``, this accepts callbacks that derive from ``pytorch_lightning.Callback``, which
    other libraries add to a Trainer of ``lightning.pytorch``.

    Args:
        name: Name of the hook.
        owner: The module or callback.
    """
    base = next((cls for cls in type(owner).__mro__ if _is_lightnings_base(cls)), None)
    if base is not None and not hasattr(base, name):  # Lightning does not call it.
        return False
    if vars(owner).get(name) is not None:  # LambdaCallback holds its functions as attributes of the instance.
        return True
    own = getattr(type(owner), name, None)
    return own is not None and own is not getattr(base, name, None)


def _is_lightnings_base(cls: type) -> bool:
    of_lightning = cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    return of_lightning and cls.__name__ in (LightningModule.__name__, Callback.__name__)


class WrappedHooks:
    """Run hooks of a module, and of the callbacks of its Trainer, inside a context.

    Args:
        module: The user's module, whose hooks are replaced on the instance.
        names: Names of the hooks, of which those that an owner defines itself are replaced.
        around: Function that returns the context for a hook, given the hook's full name (``Model.on_fit_start``).
        results: For names of hooks, functions that are given what the module's hook returns, and that return what
            Lightning is given.
    """

    def __init__(
        self,
        module: LightningModule,
        names: Iterable[str],
        around: Callable[[str], AbstractContextManager[None]],
        results: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        self._module = module
        self._names = list(names)
        self._around = around
        self._results = results or {}
        self._replaced: list[tuple[Any, str, Any]] = []

    def install(self, trainer: Trainer) -> None:
        """Replace the hooks of the module and of the callbacks of ``trainer``, until :meth:`remove`."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        users = [
            callback for callback in callbacks if not isinstance(callback, _NOT_WRAPPED) and not _is_ours(callback)
        ]
        for owner in (self._module, *users):
            for name in self._names:
                if defines_hook(name, owner) or (owner is self._module and name in _CALL_MODULES):
                    of_instance = vars(owner).get(name)
                    result = self._results.get(name) if owner is self._module else None
                    vars(owner)[name] = self._wrapped(getattr(owner, name), f"{type(owner).__name__}.{name}", result)
                    self._replaced.append((owner, name, of_instance))

    def remove(self) -> None:
        """Restore the original hooks of the module and the callbacks."""
        for owner, name, of_instance in self._replaced:
            if of_instance is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = of_instance
        self._replaced.clear()

    def _wrapped(self, own: Callable[..., Any], what: str, result: Callable[[Any], Any] | None) -> Callable[..., Any]:
        @wraps(own)
        def hook(*args: Any, **kwargs: Any) -> Any:
            with self._around(what):
                returned = own(*args, **kwargs)
            return returned if result is None else result(returned)

        return hook


def _is_ours(callback: Callback) -> bool:
    return type(callback).__module__.startswith("lightning_dist.")
