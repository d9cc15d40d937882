"""Test runs that resume inside an epoch or at its end, from the best or last checkpoint, with many kinds of states."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier

# Each name maps to (title, arguments of the first fit, arguments of the second fit).
_RESUMES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "next_epoch": ("at the end of an epoch", {"max_epochs": 1}, {"max_epochs": 3}),
    "inside": ("inside an epoch", {"max_steps": 6}, {"max_epochs": 3}),
    "accumulated": (
        "with accumulated gradients",
        {"max_steps": 2, "accumulate_grad_batches": 2},
        {"max_epochs": 3, "accumulate_grad_batches": 2},
    ),
    "other_accumulation": (
        "with another number of accumulated gradients",
        {"max_epochs": 1},
        {"max_epochs": 3, "accumulate_grad_batches": 2},
    ),
    "at_its_end": ("a fit that had reached its end", {"max_epochs": 2}, {"max_epochs": 2}),
    "inside_validation": (
        "between two validations of an epoch",
        {"max_steps": 3, "val_check_interval": 2},
        {"max_epochs": 2, "val_check_interval": 2},
    ),
    "with_clipping": (
        "with gradient clipping",
        {"gradient_clip_val": 0.1},
        {"max_epochs": 2, "gradient_clip_val": 0.1},
    ),
}


class _Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, 16)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


for _name, (_title, _first, _second) in _RESUMES.items():

    @case(f"resumed {_title}", name=f"resumed_{_name}", tolerance=1e-7)
    def _(run: Run, first: dict[str, Any] = _first, second: dict[str, Any] = _second) -> None:
        trainer = run.fit(_Scheduled(), val=True, name="first", **first)
        trainer.save_checkpoint(run.folder / "a.ckpt")
        monitor = LearningRateMonitor("step")
        run.fit(_Scheduled(), val=True, ckpt_path=str(run.folder / "a.ckpt"), callbacks=[monitor], **second)


def _checkpoint(run: Run) -> ModelCheckpoint:
    return ModelCheckpoint(run.folder, "{epoch}", monitor="val/loss", save_top_k=2, save_last=True)


for _which in ("last", "best"):

    @case(f"ckpt_path='{_which}'", name=f"resumed_from_{_which}")
    def _(run: Run, which: str = _which) -> None:
        model, callbacks = Classifier().double(), [_checkpoint(run)]
        trainer = run.fit(model, val=True, callbacks=callbacks, max_epochs=2, name="first")
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model, run.loader(), run.loader(), ckpt_path=which)
        run.observe(trainer, model)


@case("ModelCheckpoint and EarlyStopping go on where they were")
def resumed_callbacks(run: Run) -> None:
    first = [_checkpoint(run), EarlyStopping("val/loss", patience=2, mode="max")]
    run.fit(Classifier(), val=True, callbacks=first, max_epochs=2, name="first")
    again = [_checkpoint(run), EarlyStopping("val/loss", patience=2, mode="max")]
    run.fit(Classifier(), val=True, callbacks=again, max_epochs=6, ckpt_path=str(run.folder / "last.ckpt"))
    run.record("stopped", again[1].stopped_epoch)


@case("every_n_train_steps, resumed from inside the epoch")
def resumed_from_step(run: Run) -> None:
    callback = ModelCheckpoint(run.folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    run.fit(Classifier(), callbacks=[callback], observe=False)
    run.fit(Classifier(), max_epochs=2, ckpt_path=str(run.folder / "step=3.ckpt"))


@case("test and validate with ckpt_path='best'")
def evaluated_best(run: Run) -> None:
    model = Classifier().double()
    trainer = run.fit(model, val=True, callbacks=[_checkpoint(run)], max_epochs=3)
    for which in ("best", "last"):
        run.record(f"test of {which}", trainer.test(model, run.loader(), ckpt_path=which, verbose=False))
        run.record(f"validation of {which}", trainer.validate(model, run.loader(), ckpt_path=which, verbose=False))
    run.record_predictions(trainer.predict(model, run.loader(), ckpt_path="best"))


@case("a callback's state, and a module's attributes, are restored before training goes on")
def resumed_attributes(run: Run) -> None:
    class Counts(Classifier):
        seen = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen += 1
            self.log("seen", float(self.seen))

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["seen"] = self.seen

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["seen"]

    run.fit(Counts(), callbacks=[ModelCheckpoint(run.folder, "a")], observe=False)
    run.fit(Counts(), ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2)
