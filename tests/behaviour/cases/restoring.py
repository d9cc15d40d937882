"""Test which states a run restores, when it restores them, and how a run starts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, Checkpoint, ModelCheckpoint, Timer
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, Classifier


class _Remembers(Callback):
    """Save a state, and record which value it has in each hook of a resumed run."""

    def __init__(self) -> None:
        self.value = 0
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]

    def on_load_checkpoint(self, *args: Any) -> None:
        self.seen.append("on_load_checkpoint")

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(["setup", self.value])

    def on_fit_start(self, *args: Any) -> None:
        self.seen.append(["on_fit_start", self.value])


class _LearningRateInCheckpoint(Classifier):
    """Use in ``configure_optimizers`` a value that ``on_load_checkpoint`` has set."""

    saved_lr: float | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["saved_lr"] = 0.01

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved_lr = checkpoint["saved_lr"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.saved_lr or self.hparams.lr)


@case("callbacks and the module have their states back before on_fit_start and configure_optimizers")
def states_before_fit_start(run: Run) -> None:
    trainer = run.fit(_LearningRateInCheckpoint().double(), callbacks=[_Remembers()])
    trainer.save_checkpoint(run.folder / "a.ckpt")
    remembers, model = _Remembers(), _LearningRateInCheckpoint(lr=0.5).double()
    run.fit(model, callbacks=[remembers], ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2, name="resumed")
    run.record("order", remembers.seen)
    run.record("learning rate", model.saved_lr)


class _Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[1], train_bn=False)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[1], optimizer, lr=0.01)


class _OnlyTrainable(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@case("BaseFinetuning is resumed after it has added a parameter group")
def resume_finetuning(run: Run) -> None:
    trainer = run.fit(_OnlyTrainable().double(), callbacks=[_Unfreeze()], max_epochs=2)
    trainer.save_checkpoint(run.folder / "a.ckpt")
    resumed = _OnlyTrainable(lr=0.5).double()
    run.fit(resumed, callbacks=[_Unfreeze()], max_epochs=3, ckpt_path=str(run.folder / "a.ckpt"), name="resumed")


@case("a Timer whose time was up before the resume trains no further step")
def resume_timer(run: Run) -> None:
    trainer = run.fit(Classifier().double(), callbacks=[Timer(timedelta(days=1))])
    trainer.save_checkpoint(run.folder / "a.ckpt")
    timer = Timer(timedelta(microseconds=1))
    run.fit(Classifier().double(), callbacks=[timer], max_steps=9, ckpt_path=str(run.folder / "a.ckpt"), name="resumed")


class _NoOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return None


@case("configure_optimizers that returns None: saved and resumed")
def no_optimizer(run: Run) -> None:
    trainer = run.fit(_NoOptimizer().double())
    trainer.save_checkpoint(run.folder / "a.ckpt")
    run.fit(_NoOptimizer(lr=0.5).double(), max_epochs=2, ckpt_path=str(run.folder / "a.ckpt"), name="resumed")


@case("trainer.init_module(empty_init=True) gives the values that the constructor would give")
def empty_init(run: Run) -> None:
    trainer = run.trainer()
    with trainer.init_module(empty_init=not run.is_reference):
        model = Classifier()
    trainer.fit(model, run.loader())
    run.observe(trainer, model)


@case("trainer.init_module() makes a module of the Trainer's precision")
def init_module(run: Run) -> None:
    trainer = run.trainer()
    with trainer.init_module():
        model = Classifier()
    run.record("dtype", str(next(model.parameters()).dtype))
    trainer.fit(model, run.loader())
    run.observe(trainer, model)


class _ZeroRedundancy(Classifier):
    def configure_optimizers(self) -> Any:
        if not torch.distributed.is_initialized():
            return super().configure_optimizers()
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


@case("ZeroRedundancyOptimizer", refused={"*": "ZeroRedundancyOptimizer"})
def zero_redundancy(run: Run) -> None:
    run.fit(_ZeroRedundancy())


class _Baseline(pl.LightningModule):
    """Evaluate without any parameters."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/accuracy", (x[:, :NUM_CLASSES].argmax(1) == y).double().mean(), sync_dist=True)
        self.log("val/mean", x.mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0] * 2


@case("validate, test and predict a module without parameters")
def no_parameters(run: Run) -> None:
    model, trainer = _Baseline(), run.trainer(limit_test_batches=2, limit_predict_batches=2)
    run.record("validate", trainer.validate(model, run.loader(), verbose=False))
    run.record("test", trainer.test(model, run.loader(), verbose=False))
    predictions = trainer.predict(model, run.loader())
    if predictions:
        run.record("predictions", torch.cat(predictions), per_rank=True)


@case("a ckpt_path that is missing raises FileNotFoundError")
def missing_checkpoint(run: Run) -> None:
    for function in ("fit", "validate", "test", "predict"):
        try:
            getattr(run.trainer(), function)(Classifier(), run.loader(), ckpt_path=str(run.folder / "no.ckpt"))
        except FileNotFoundError:
            run.record(function, "FileNotFoundError")


class _Order(Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.are_checkpoints = [isinstance(callback, Checkpoint) for callback in trainer.callbacks]
        self.mesh = pl_module.device_mesh


@case("checkpoint callbacks stay last, and the module has its device mesh")
def order_of_callbacks(run: Run) -> None:
    order = _Order()
    run.fit(Classifier(), callbacks=[order, ModelCheckpoint(run.folder)], observe=False)
    run.record("checkpoint callbacks are last", order.are_checkpoints == sorted(order.are_checkpoints))
    run.record("has its mesh", run.is_reference or order.mesh.size() == run.layout.world_size)
