"""Test hooks and steps that change weights right after a checkpoint was requested, which copies them meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier

_WIDTH = 600


class _Large(Classifier):
    """Have a layer whose copy takes some time."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(_WIDTH, _WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.ones(1, _WIDTH, dtype=torch.float64)
        return super().training_step(batch, batch_idx) + 0 * self.large(x).sum()

    @torch.no_grad()
    def shrink(self) -> None:
        if not self.trainer.sanity_checking:
            for p in self.parameters():
                p.mul_(0.99)


def _fit(run: Run, model: Classifier, **kwargs: Any) -> None:
    saves = ModelCheckpoint(run.folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_on_train_epoch_end=False)
    callbacks = [*kwargs.pop("callbacks", ()), saves]
    run.fit(model, val=True, val_check_interval=2, callbacks=callbacks, **kwargs)
    for step in (2, 4):
        run.record_checkpoint(run.folder / f"step={step}.ckpt", f"checkpoint of step {step}")


@case("on_validation_model_eval and on_validation_model_train change weights after a save")
def changed_by_model_hooks(run: Run) -> None:
    class Changes(_Large):
        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            self.shrink()

        def on_validation_model_train(self) -> None:
            self.train()
            self.shrink()

    _fit(run, Changes())


class _Merging(nn.Linear):
    """Add an adapter to the weight for evaluation, and subtract it for training, as adapters do in ``train()``."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.is_merged = False

    def train(self, mode: bool = True) -> _Merging:
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += (-1 if mode else 1) * (self.up.weight @ self.down.weight).data
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        x, y = super().forward(x), x
        return x if self.is_merged else x + self.up(self.down(y))


@case("train() and eval() of a layer merge an adapter into its weight, and take it out")
def merged_by_train(run: Run) -> None:
    class Merges(_Large):
        def __init__(self) -> None:
            super().__init__()
            self.net[0] = _Merging()

        def on_validation_model_train(self) -> None:
            self.train()

    _fit(run, Merges())


@case("a schedule's step, and a callback, change weights after a save")
def changed_by_other_hooks(run: Run) -> None:
    class Changes(_Large):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()
            self.shrink()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]

    class Shrinks(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.shrink()

    _fit(run, Changes(), callbacks=[Shrinks()])


@case(
    "the step after a save changes weights",
    refused=dict.fromkeys(("pp", "nd"), "The step changes the parameter 'large\\.weight"),
)
def changed_by_the_step(run: Run) -> None:
    class Changes(_Large):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.large.weight.mul_(0.99)
            return super().training_step(batch, batch_idx)

    _fit(run, Changes())
