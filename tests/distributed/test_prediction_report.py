"""Test that a run predicts its own memory and time, and logs them beside the measured ones."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from examples.gpt.model import GPTModule
from lightning_dist import FullShardStrategy, HybridShardStrategy, PredictionReport, TensorParallelStrategy
from tests.distributed.fit import make_trainer
from tests.planning.cases import Case, make
from tests.planning.measured import measure
from tests.pool import WorkerPool

pytestmark = pytest.mark.gloo  # Memory and time are compared, to which the backend of the tests adds.


class Kept(Logger):
    """Keep the metrics that are logged."""

    name = version = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics |= metrics

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


STRATEGIES = {
    "full_shard": (FullShardStrategy, {"activation_checkpointing": "full"}),
    "hybrid": (HybridShardStrategy, {"dp_replicate_size": 2, "dp_shard_size": 1, "global_batch_size": 16}),
    "tp": (TensorParallelStrategy, {"tp_size": 2, "dp_shard_size": 1}),
}
CASES = {
    "full_shard": Case("GPT", 2, {"dp_shard_size": 2, "activation_checkpointing": "full"}),
    "hybrid": Case("GPT", 2, {"dp_replicate_size": 2}),
    "tp": Case("GPT", 2, {"tp_size": 2}),
}

THOROUGH = pytest.mark.thorough


def train(key: str, num_steps: int) -> tuple[dict[str, float], list[str]]:
    """Train on all ranks of this test, and return what rank 0 has logged and printed. This is a collective."""
    torch.set_num_threads(1)
    module, data, _ = make(CASES[key])
    kind, arguments = STRATEGIES[key]
    trainer = make_trainer(
        "auto",
        strategy=kind(**arguments),
        max_steps=num_steps,
        logger=[logger := Kept()],
        callbacks=[PredictionReport()],
        use_distributed_sampler=True,
    )
    printed: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        trainer.fit(module, data)
    finally:
        log.removeHandler(handler)
    return logger.metrics, printed


@pytest.mark.parametrize(
    "key", ["full_shard", *(pytest.param(k, marks=pytest.mark.thorough) for k in ("hybrid", "tp"))]
)
def test_the_prediction_stands_beside_what_is_measured(pool: WorkerPool, key: str) -> None:
    metrics, printed = pool.run(train, 2, key, 8)[0]
    measured = pool.run(measure, 2, CASES[key])[0]
    assert metrics["plan/peak_mib_predicted"] == pytest.approx(measured.peak / 2**20, rel=0.01)
    assert metrics["plan/step_ms_error"] == pytest.approx(
        metrics["plan/step_ms_predicted"] / metrics["plan/step_ms"] - 1
    )
    (table,) = [text for text in printed if text.startswith("prediction for a rank")]
    assert f"peak                            {metrics['plan/peak_mib_predicted']:>11,.1f} MiB" in table
    assert "ms: compute" in table


class Unpredictable(GPTModule):
    """Refuse to run in another process, as that of a dry run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process = os.getpid()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if os.getpid() != self.process:
            raise ValueError("This module trains where it was made.")
        return super().training_step(batch, batch_idx)


def train_what_cannot_be_predicted() -> tuple[dict[str, float], list[str]]:
    """Train on all ranks of this test, and return the logged metrics and the warnings. This is a collective."""
    _, data, _ = make(CASES["full_shard"])
    module = Unpredictable(dim=32, num_layers=1, num_heads=2, max_len=128, lr=1e-3, warmup_steps=2)
    trainer = make_trainer(
        "full_shard",
        max_steps=8,
        logger=[logger := Kept()],
        callbacks=[PredictionReport()],
        use_distributed_sampler=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    return logger.metrics, [str(one.message) for one in caught]


def test_a_run_that_cannot_be_predicted_trains(pool: WorkerPool) -> None:
    metrics, caught = pool.run(train_what_cannot_be_predicted, 2)[0]
    expected = "PredictionReport: this run cannot be predicted: This module trains where it was made."
    assert expected in caught, caught
    assert not any(name.startswith("plan/") for name in metrics)


def test_a_strategy_of_lightning_is_refused() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[PredictionReport()])
    with pytest.raises(MisconfigurationException, match="PredictionReport with SingleDeviceStrategy"):
        trainer.fit(BoringModel())
