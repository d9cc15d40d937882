"""Test plain training, a tied language model, and the most common callbacks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.behaviour.case import ROUNDED, Run, case
from tests.behaviour.models import Classifier, LanguageModel, tokens


@case("plain training, validated and tested")
def plain(run: Run) -> None:
    model = Classifier()
    trainer = run.fit(model, val=True, max_epochs=2)
    run.record("test", trainer.test(model, run.loader(), verbose=False))


@case("a tied language model whose layers are children of the LightningModule")
def tied_language_model(run: Run) -> None:
    run.fit(LanguageModel(), run.loader(tokens()))


@case("ModelCheckpoint keeps the best of a monitored metric, and the last")
def best_checkpoint(run: Run) -> None:
    callback = ModelCheckpoint(
        run.folder, "{epoch}", monitor="val/loss", save_top_k=2, save_last=True, auto_insert_metric_name=False
    )
    run.fit(Classifier(), val=True, max_epochs=4, callbacks=[callback])


@case(
    "EarlyStopping ends at the same epoch", differs=dict.fromkeys(("compressed", "tp_tokens", "cp", "tiled"), ROUNDED)
)
def early_stopping(run: Run) -> None:
    run.fit(Classifier(lr=1.0), val=True, max_epochs=6, callbacks=[EarlyStopping("val/loss", patience=1)])


class _Order(pl.Callback):
    def __init__(self) -> None:
        self.hooks: list[str] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.hooks.append("batch start")

    def on_before_backward(self, *args: Any) -> None:
        self.hooks.append("before backward")

    def on_after_backward(self, *args: Any) -> None:
        self.hooks.append("after backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.hooks.append("before optimizer step")

    def on_before_zero_grad(self, *args: Any) -> None:
        self.hooks.append("before zero grad")

    def on_train_batch_end(self, *args: Any) -> None:
        self.hooks.append("batch end")


@case("the hooks of a callback are called in Lightning's order")
def order_of_hooks(run: Run) -> None:
    order = _Order()
    run.fit(Classifier(), callbacks=[order], accumulate_grad_batches=2)
    run.record("hooks", order.hooks)
