"""Test that metrics, evaluation loops and callbacks give the same results in a sharded run as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torchmetrics.classification import MulticlassAccuracy

from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import GPT
from tests.pool import WorkerPool


class Measured(GPT):
    """Log a torchmetrics metric, and sums and means over ranks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(num_classes=32, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        predicted = self.model(tokens).argmax(-1)
        self.accuracy(predicted.flatten(), targets.flatten())
        self.log("val/accuracy", self.accuracy)
        self.log("val/loss", self.loss(batch), sync_dist=True)
        self.log("val/count", float(len(tokens)), reduce_fx="sum", sync_dist=True)


def loops(layout: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Measured(optimizer="adamw")
    saving = ModelCheckpoint(folder / "checkpoints", monitor="val/loss", save_top_k=1, filename="{step}")
    trainer = make_trainer(
        layout,
        max_steps=8,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=3,
        limit_test_batches=3,
        limit_predict_batches=2,
        enable_checkpointing=True,
        callbacks=[saving, EarlyStopping("val/loss", patience=2, min_delta=1e3), LearningRateMonitor("step")],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
    )
    trainer.fit(model)
    result = {name: float(value) for name, value in trainer.callback_metrics.items()}
    result["stopped_at"] = trainer.global_step
    result["best"] = Path(saving.best_model_path).name
    result["best_score"] = float(saving.best_model_score)
    result["validate"] = trainer.validate(model, verbose=False)[0]["val/loss"]
    result["test"] = trainer.test(model, ckpt_path="best", verbose=False)[0]["test/loss"]
    result["predict"] = [batch.tolist() for batch in trainer.predict(model)]
    return result


def test_loops_metrics_and_callbacks_agree_with_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    expected = pool.run(loops, 1, "auto", tmp_path / "one")[0]
    ranks = pool.run(loops, 4, "2x2", tmp_path / "four")
    assert expected["stopped_at"] == 6  # After the first check, none improves by 1000, so EarlyStopping stops.
    for actual in ranks:
        assert actual["best"] == expected["best"]
        assert actual["stopped_at"] == 6
        assert actual["val/count"] == expected["val/count"] == 3 * 8
        for name in ("val/accuracy", "val/loss", "best_score", "validate", "test", "train/loss"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-4), name
    # Each sample is predicted once: rank r predicts samples r, r + 4, ...
    for batch in range(2):
        together = [None] * 8
        for rank, actual in enumerate(ranks):
            together[rank::4] = actual["predict"][batch]
        assert together == expected["predict"][batch]


def averaged(layout: str, folder: Path, num_steps: int, ckpt_path: str | None = None) -> tuple[Weights, float]:
    torch.manual_seed(0)
    model = GPT(optimizer="adamw")
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(
        layout,
        max_epochs=num_steps // 2,
        limit_train_batches=2,
        limit_val_batches=2,
        callbacks=[EMAWeightAveraging(decay=0.5), saving],
        enable_checkpointing=True,
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return weights_of(model), float(trainer.callback_metrics["val/loss"])


def test_averaged_weights_agree_with_one_process_and_are_resumed(pool: WorkerPool, tmp_path: Path) -> None:
    expected, loss = pool.run(averaged, 1, "auto", tmp_path / "one", 6)[0]
    actual, sharded_loss = pool.run(averaged, 4, "2x2", tmp_path / "four", 6)[0]
    # The true gradient of a key's bias is zero, so Adam divides rounding errors by rounding errors.
    biases = [f"model.blocks.{block}.qkv.bias" for block in range(2)]
    assert_same(actual, expected, 1e-4, biases)
    assert sharded_loss == pytest.approx(loss, rel=1e-5)
    resumed, _ = pool.run(averaged, 2, "full_shard", tmp_path / "two", 6, str(tmp_path / "four" / "epoch=1.ckpt"))[0]
    assert_same(resumed, actual, 1e-4, biases)


def refuse_weight_swapping() -> None:
    make_trainer("2x2", callbacks=[StochasticWeightAveraging(0.1)], max_steps=1).fit(GPT())


def test_stochastic_weight_averaging_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="StochasticWeightAveraging swaps whole modules"):
        pool.run(refuse_weight_swapping, 4)


class Tunable(GPT):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr)


def find_lr(layout: str, folder: Path) -> tuple[list[float], Weights]:
    torch.manual_seed(0)
    model = Tunable()
    trainer = make_trainer(layout, max_steps=5, precision="64-true", default_root_dir=folder)
    finder = Tuner(trainer).lr_find(model, num_training=12, update_attr=False)
    return finder.results["loss"], weights_of(model)


def test_the_learning_rate_finder_agrees_with_one_process_and_restores_the_weights(
    pool: WorkerPool, tmp_path: Path
) -> None:
    losses, before = pool.run(find_lr, 1, "auto", tmp_path)[0]
    for actual, after in pool.run(find_lr, 2, "full_shard", tmp_path):
        assert actual == pytest.approx(losses, rel=1e-10)
        assert_same(after, before)
    assert list(tmp_path.iterdir()) == []
