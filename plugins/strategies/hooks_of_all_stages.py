"""Hooks of the module and of callbacks under a pipeline: they see the parameters of all stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dist.pipeline import AllStages
from lightning_dist.plugins.strategies.wrapped_hooks import WrappedHooks

__all__ = ["hooks_of_all_stages"]

_RUNS = ("train", "validation", "test", "predict")
_HOOKS = (
    *(f"on_{run}_{when}" for run in _RUNS for when in ("start", "end")),
    *(f"on_{run}_{part}_{when}" for run in _RUNS for part in ("epoch", "batch") for when in ("start", "end")),
    "configure_gradient_clipping", "on_after_backward", "on_before_backward", "on_before_optimizer_step",
    "on_before_zero_grad", "on_fit_end", "on_fit_start", "on_sanity_check_end", "on_sanity_check_start",
)  # fmt: skip
"""Hooks that run outside of steps."""


def hooks_of_all_stages(module: LightningModule, all_stages: AllStages) -> WrappedHooks:
    """Let hooks that a user has written look at, and change, the parameters of all stages.

    Args:
        module: The user's module.
        all_stages: What runs code on the parameters of all stages.
    """

    @contextmanager
    def around(what: str) -> Iterator[None]:
        with all_stages.around(what), _logging_whole(module, all_stages):
            yield

    return WrappedHooks(module, _HOOKS, around)


@contextmanager
def _logging_whole(module: LightningModule, all_stages: AllStages) -> Iterator[None]:
    """Let ``self.log`` be given values that all ranks have."""
    if "log" in vars(module):
        yield
        return

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        type(module).log(module, name, all_stages.whole(value), *args, **kwargs)

    vars(module)["log"] = log
    try:
        yield
    finally:
        vars(module).pop("log", None)
