"""Test learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.optim import Optimizer, lr_scheduler

from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier


def _sequential(o: Optimizer) -> Any:
    first = lr_scheduler.LinearLR(o, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(o, [first, lr_scheduler.ExponentialLR(o, 0.8)], [2])


# Each name maps to (title, function that makes the scheduler, further entries of Lightning's scheduler dictionary).
_SCHEDULERS: dict[str, tuple[str, Callable[[Optimizer], Any], dict[str, Any]]] = {
    "by_epoch": ("StepLR by epoch", lambda o: lr_scheduler.StepLR(o, 1, 0.5), {}),
    "by_step": ("StepLR by step", lambda o: lr_scheduler.StepLR(o, 2, 0.5), {"interval": "step"}),
    "by_frequency": (
        "ExponentialLR every 2 steps",
        lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        {"interval": "step", "frequency": 2},
    ),
    "one_cycle": ("OneCycleLR", lambda o: lr_scheduler.OneCycleLR(o, 0.1, 8), {"interval": "step"}),
    "sequential": ("SequentialLR: a warm-up, then decay", _sequential, {"interval": "step"}),
    "chained": (
        "ChainedScheduler",
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
        ),
        {"interval": "step"},
    ),
    "warm_restarts": (
        "CosineAnnealingWarmRestarts",
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        {"interval": "step"},
    ),
    "lambda": ("LambdaLR", lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)), {"interval": "step"}),
    "plateau": (
        "ReduceLROnPlateau of a validation metric",
        lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", 0.1, patience=0),
        {"monitor": "val/loss"},
    ),
    "plateau_of_steps": (
        "ReduceLROnPlateau of the training loss, by step",
        lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", 0.5, patience=0),
        {"monitor": "train/loss", "interval": "step"},
    ),
    "named": ("a scheduler with a name", lambda o: lr_scheduler.StepLR(o, 1, 0.5), {"name": "my rate"}),
}

for _name, (_title, _make, _config) in _SCHEDULERS.items():

    @case(_title, name=f"scheduler_{_name}")
    def _(run: Run, make: Callable[[Optimizer], Any] = _make, config: dict[str, Any] = _config) -> None:
        class Schedules(Classifier):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

        run.fit(Schedules(), val=True, max_epochs=2, callbacks=[LearningRateMonitor(), ModelCheckpoint(run.folder)])


@case("a plateau scheduler whose metric is missing is Lightning's own error")
def plateau_without_metric(run: Run) -> None:
    class Schedules(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "nothing"}}

    run.record_error("error", lambda: run.fit(Schedules(), val=True, observe=False))


@case("schedulers with accumulated gradients: a step of the optimizer is a step of the scheduler")
def scheduler_accumulated(run: Run) -> None:
    class Schedules(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]

    run.fit(Schedules(), accumulate_grad_batches=2, max_epochs=2, callbacks=[LearningRateMonitor("step")])
