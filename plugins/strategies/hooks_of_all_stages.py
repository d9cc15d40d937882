"""Let hooks of the module and of callbacks see the parameters of all stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from lightning_dist.pipeline import AllStages
from lightning_dist.plugins.strategies.wrapped_hooks import OUTSIDE_OF_STEPS, WrappedHooks
from lightning_dist.shards_in_hooks import ShardsInHooks

__all__ = ["hooks_of_all_stages"]


def hooks_of_all_stages(module: LightningModule, all_stages: AllStages) -> WrappedHooks:
    """Return wrapped hooks, in which the user's code can read and change the parameters of all stages.

    Args:
        module: The user's module.
        all_stages: The object that runs code on the parameters of all stages.
    """
    shards = ShardsInHooks()

    @contextmanager
    def around(what: str) -> Iterator[None]:
        with shards.around(what), all_stages.around(what), _logging_whole(module, all_stages):
            yield

    return WrappedHooks(module, OUTSIDE_OF_STEPS, around)


@contextmanager
def _logging_whole(module: LightningModule, all_stages: AllStages) -> Iterator[None]:
    """Make ``self.log`` fetch values that only another stage has, so that all ranks log the same."""
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
