"""Test errors in a run after which a checkpoint is saved, and which the user catches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier


class _Fails(Classifier):
    """Raise in the given hook of the third step."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _fail(self, hook: str, step: int) -> None:
        if hook == self.hook and step == 2:
            raise ValueError("failed on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self._fail("training_step", batch_idx)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._fail("on_before_optimizer_step", self.global_step)


def _fail_and_go_on(run: Run, model: _Fails) -> None:
    """Catch the error of a fit that saves after the error; then train a new module, and resume from the checkpoint."""
    callbacks = [
        OnExceptionCheckpoint(run.folder, "error"),
        ModelCheckpoint(run.folder / "best", "error", save_on_exception=True),
    ]
    trainer = run.trainer(callbacks=callbacks, max_steps=5, limit_train_batches=1.0)
    try:
        trainer.fit(model.double(), run.loader())
    except Exception as error:
        run.record("says why", "failed on purpose" in " ".join([str(error), *getattr(error, "__notes__", [])]))
    run.record_checkpoint(run.folder / "error.ckpt", "saved after the error")
    run.record("both saved", (run.folder / "best" / "error.ckpt").exists())
    run.fit(Classifier(), max_steps=2, name="new")
    run.fit(Classifier(lr=0.5).double(), max_steps=4, ckpt_path=str(run.folder / "error.ckpt"), name="resumed")


@case("an error in a step on all ranks: saved, caught, and gone on from")
def error_on_all_ranks(run: Run) -> None:
    _fail_and_go_on(run, _Fails("training_step"))


@case("an error before the optimizer's step on all ranks: saved, caught, and gone on from")
def error_before_update(run: Run) -> None:
    _fail_and_go_on(run, _Fails("on_before_optimizer_step"))
