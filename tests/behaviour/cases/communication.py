"""Test communication of decisions and tensors between processes by the user."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier


class _Improves(Classifier):
    """Log a metric that improves with every step."""

    def on_validation_epoch_end(self) -> None:
        self.log("improves", torch.tensor(10.0 - self.trainer.global_step), sync_dist=True)


@case("ModelCheckpoint replaces its best by a better one at every validation")
def best_is_replaced(run: Run) -> None:
    callback = ModelCheckpoint(run.folder, "{step}", monitor="improves")
    run.fit(_Improves(), val=True, max_steps=4, val_check_interval=1, callbacks=[callback])


class _Decides(Classifier):
    def on_train_epoch_end(self) -> None:
        decide = self.trainer.strategy.reduce_boolean_decision
        is_first = self.global_rank == 0
        self.decisions = [decide(True), decide(False), decide(True, all=False), decide(False, all=False)]
        self.mixed = [decide(not is_first), decide(is_first, all=False)]


@case("strategy.reduce_boolean_decision")
def boolean_decisions(run: Run) -> None:
    model = _Decides()
    run.fit(model)
    run.record("decisions", model.decisions)
    run.record("only rank 0 says no, or yes", model.mixed)


class _Gathers(Classifier):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        gathered = self.all_gather({"x": batch[0].sum(1), "y": batch[1]})
        self.gathered = {name: value.flatten().sort().values for name, value in gathered.items()}


@case("self.all_gather in a hook returns every sample of the batch once")
def all_gather_in_hook(run: Run) -> None:
    model = _Gathers()
    run.fit(model, val=True, limit_val_batches=1)
    run.record("gathered", model.gathered)
