"""Test where the time of a step goes and which rank the others wait for, measured on several ranks."""

from __future__ import annotations

import logging
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_dist.plugins.callbacks import StepTelemetry
from lightning_dist.plugins.callbacks.telemetry import step_telemetry
from tests.accelerator import place
from tests.pool import WorkerPool

SLEEP_MS = 40
NUM_STEPS = 9


class Recording(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append(metrics)


class Sleeper(pl.LightningModule):
    """Sleep in the forward of the last rank, for which the others wait when they reduce gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_rank == self.trainer.world_size - 1:
            time.sleep(SLEEP_MS / 1000)
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logged(strategy: str) -> tuple[dict[str, float], int]:
    """Return the metrics of the last interval, and how often the ranks exchanged figures."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    calls, gather = [], step_telemetry.gather
    step_telemetry.gather = lambda *args: calls.append(args) or gather(*args)  # type: ignore[func-returns-value]
    logger = Recording()
    trainer = pl.Trainer(
        **place(),
        strategy=strategy,
        max_steps=NUM_STEPS,
        callbacks=[StepTelemetry(4)],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Sleeper(), DataLoader(torch.ones(2 * 4 * NUM_STEPS, 64), batch_size=4))
    finally:
        step_telemetry.gather = gather
    return [metrics for metrics in logger.logged if "perf/step_ms" in metrics][1], len(calls)


@pytest.mark.gloo
@pytest.mark.alone
@pytest.mark.parametrize("strategy", ["data_parallel", "full_shard", "ddp"])
def test_the_rank_that_holds_up_the_others_is_found(pool: WorkerPool, strategy: str) -> None:
    for metrics, num_exchanges in pool.run(logged, 2, strategy):
        assert num_exchanges == 3  # The ranks exchange figures in steps 4, 8 and at the end, and in no other step.
        step_ms = metrics["perf/step_ms"]
        assert step_ms > SLEEP_MS
        parts = sum(metrics[f"perf/{phase}_ms"] for phase in ("data", "forward", "backward", "optimizer"))
        assert SLEEP_MS / 2 < parts <= 1.01 * step_ms
        if strategy == "ddp":  # Its waits are in torch's C++ code, and are not seen.
            assert "perf/exposed_comm_ms" not in metrics
            continue
        assert metrics["perf/slowest_rank"] == 1
        # The first rank waits for as long as the second one sleeps; the mean of both is half of this.
        assert 0.4 * SLEEP_MS < metrics["perf/exposed_comm_ms"] < step_ms
        assert metrics["perf/busy_ms_slowest_rank"] - metrics["perf/busy_ms_fastest_rank"] > SLEEP_MS / 2
