"""Make what a run trains once more, for dry runs of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_dist.plugins import _compat
from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.plugins.strategies.nd_parallel import NDParallelStrategy

__all__ = ["Trained"]


class _AnyLayout(NDParallelStrategy):
    """Take the arguments of all strategies."""

    offers = NDParallelStrategy.offers | {"zero_stage"}


@dataclass(frozen=True)
class Trained:
    """Make what is trained, for the dry run of a layout.

    Args:
        module: The user's module.
        data: The data that the Trainer was given.
        options: The arguments of the strategy besides those of the layout.
        arguments: Further arguments of the Trainer.
    """

    module: LightningModule
    data: Any
    options: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, strategy: MeshStrategy, options: Mapping[str, Any]) -> Trained:
        """Return what the Trainer of ``strategy`` trains.

        Args:
            strategy: The strategy of a fit that is about to begin.
            options: The arguments of the strategy besides those of the layout.
        """
        trainer = strategy.trainer
        arguments = {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "limit_train_batches": trainer.limit_train_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            "plugins": [trainer.precision_plugin],
        }
        data = getattr(trainer, "datamodule", None) or _compat.given_train_loader(trainer)
        return cls(strategy.module, data, options, arguments)

    def __call__(self, layout: Layout) -> tuple[LightningModule, Any, Mapping[str, Any]]:
        """Return the module, the data, and the arguments of a Trainer."""
        strategy = _AnyLayout(**{**self.options, **layout.arguments})
        return self.module, self.data, {**self.arguments, "strategy": strategy}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled for another process: all but the Trainer, whose loggers have threads and locks."""
        return {**vars(self), "module": _without_trainer(self.module), "data": _without_trainer(self.data)}


def _without_trainer(thing: Any) -> Any:
    """Return a shallow copy of a module or its data that belongs to no Trainer; other things as they are."""
    if not isinstance(thing, LightningModule | LightningDataModule):
        return thing
    clone = copy.copy(thing)
    vars(clone)["_trainer" if isinstance(thing, LightningModule) else "trainer"] = None
    return clone
