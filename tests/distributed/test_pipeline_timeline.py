"""Test that ranks of a pipeline wait as long, and hold as many activations, as the formulas of the schedules say."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from lightning_dist import PipelineParallelStrategy
from lightning_dist.mesh.timeline import Order, Timeline
from lightning_dist.parallel_module import parallelized
from lightning_dist.plugins.callbacks import StepTelemetry
from lightning_dist.plugins.loggers import MLflowLogger
from lightning_dist.techniques.pipeline import Pipeline
from lightning_dist.techniques.pipeline.simulation import simulate
from tests.accelerator import place
from tests.pool import WorkerPool
from tests.thorough import one_in

PP_SIZE = 4
NUM_BLOCKS = 8
NUM_STEPS = 16
SECONDS = 0.02


class Sleeping(torch.autograd.Function):
    """Sleep in the forward, and twice as long in the backward, so that two cores can run four ranks at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(x)
        time.sleep(seconds)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return gradient * 2, None


@dataclass
class Live:
    """Count the activations that are saved for a backward."""

    now: int = 0
    peak: int = 0


class Saved:
    """Hold an activation for autograd, and count it as long as it lives."""

    def __init__(self, tensor: Tensor, live: Live) -> None:
        self.tensor, self.live = tensor, live
        self.counts = not isinstance(tensor, FakeTensor)  # Steps are traced on fake tensors.
        if self.counts:
            live.now += 1
            live.peak = max(live.peak, live.now)

    def __del__(self) -> None:
        if self.counts:
            self.live.now -= 1


class Block(nn.Module):
    def __init__(self, seconds: float, live: Live) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds, self.live = seconds, live

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Saved(tensor, self.live), lambda s: s.tensor):
            return Sleeping.apply(x, self.seconds)


class Sleeper(pl.LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.live = Live()
        self.blocks = nn.ModuleList(Block(seconds, self.live) for _ in range(NUM_BLOCKS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@dataclass
class Seen:
    """Record for each step its timeline, and the largest number of activations that this rank held."""

    timelines: list[Timeline] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    order: Order = ()


TOLERANCE = 0.1
AT_LEAST = 3
"""Smallest number of steps; the first of them is also traced on tensors without values."""


class Look(pl.Callback):
    """Record each step, and end the run once the bubble of a step agrees with ``theory``.

    All ranks see the same timelines, and so end at the same step.
    """

    def __init__(self, theory: float | None) -> None:
        self.seen, self.theory = Seen(), theory

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Sleeper, *args: Any) -> None:
        gc.collect()  # This frees the tensors without values on which the step was traced.
        assert pl_module.live.now == 0
        pl_module.live.peak = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Sleeper, *args: Any) -> None:
        parallel = parallelized(pl_module)
        assert parallel is not None
        pipeline = parallel.get(Pipeline)
        assert pipeline is not None
        timeline = pipeline.runner.timeline(pipeline.group)
        assert timeline is not None
        self.seen.timelines.append(timeline)
        self.seen.peaks.append(pl_module.live.peak)
        self.seen.order = pipeline.runner.order
        if self.theory is not None and len(self.seen.timelines) >= AT_LEAST:
            least = min(timeline.bubble for timeline in self.seen.timelines)
            trainer.should_stop = least == pytest.approx(self.theory, rel=TOLERANCE)


def run(
    schedule: str, num_microbatches: int, seconds: float, num_steps: int, until_bubble: float | None = None
) -> Seen:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    look = Look(until_bubble)
    trainer = pl.Trainer(
        **place(),
        strategy=PipelineParallelStrategy(PP_SIZE, num_microbatches=num_microbatches, schedule=schedule),
        max_steps=num_steps,
        use_distributed_sampler=False,
        callbacks=[look],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sleeper(seconds), DataLoader(torch.ones(64 * num_microbatches, 4), batch_size=2 * num_microbatches))
    return look.seen


@pytest.mark.thorough
@pytest.mark.gloo
@pytest.mark.alone
@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), one_in(3, [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
)
def test_measured_bubbles_equal_the_formulas(pool: WorkerPool, schedule: str, virtual_stages: int) -> None:
    num_microbatches = 8
    theory = (PP_SIZE - 1) / (virtual_stages * num_microbatches + PP_SIZE - 1)
    ranks = pool.run(run, PP_SIZE, schedule, num_microbatches, virtual_stages * SECONDS, NUM_STEPS, theory)
    for seen in ranks:
        assert simulate(seen.order).bubble == pytest.approx(theory)
        # Other processes on the machine can only make ranks wait longer, so the step with the smallest bubble counts.
        bubbles = [timeline.bubble for timeline in seen.timelines]
        assert min(bubbles) == pytest.approx(theory, rel=TOLERANCE), bubbles
    for timelines in zip(*(seen.timelines for seen in ranks), strict=True):
        assert all(timeline == timelines[0] for timeline in timelines)
        for rank, actions in enumerate(ranks[0].order):
            own = [span for span in timelines[0].spans if span.rank == rank]
            assert [span.action for span in own] == list(actions)
            assert all(first.end <= second.start for first, second in pairwise(own))


@pytest.mark.parametrize("num_microbatches", [4, 8])
@pytest.mark.parametrize("schedule", one_in(2, ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"]))
def test_the_numbers_of_held_activations_equal_the_formulas(
    pool: WorkerPool, schedule: str, num_microbatches: int
) -> None:
    ranks = pool.run(run, PP_SIZE, schedule, num_microbatches, 0.0, 3)
    order = ranks[0].order
    stages_per_rank = len({action.stage for action in order[0]})
    interleaved = (stages_per_rank - 1) * PP_SIZE + 2 * (PP_SIZE - 1) + 1
    formulas = {
        "gpipe": lambda rank: num_microbatches,
        "1f1b": lambda rank: min(num_microbatches, PP_SIZE - rank),
        "interleaved_1f1b": lambda rank: min(stages_per_rank * num_microbatches, interleaved - 2 * rank),
    }
    for rank, seen in enumerate(ranks):
        in_flight = most_in_flight(order[rank])
        if schedule in formulas:
            assert in_flight == formulas[schedule](rank)
        # The first step is left out, because it is traced on tensors without values before it runs.
        assert seen.peaks[1:] == [in_flight * NUM_BLOCKS // (PP_SIZE * stages_per_rank)] * 2


def most_in_flight(actions: Sequence[Any]) -> int:
    """Return the largest number of forwards that a rank has run and whose backward it has not run yet."""
    now = peak = 0
    for action in actions:
        now += {"F": 1, "B": -1}[action.kind]
        peak = max(peak, now)
    return peak


def run_logged(folder: Path) -> list[list[tuple[int, float]]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logger = MLflowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    trainer = pl.Trainer(
        **place(),
        strategy=PipelineParallelStrategy(2, num_microbatches=4, dp_replicate_size=2),
        max_steps=5,
        use_distributed_sampler=False,
        callbacks=[StepTelemetry(log_every_n_steps=2)],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sleeper(0.001), DataLoader(torch.ones(64, 4), batch_size=8))
    if trainer.global_rank:
        return []
    logger.flush()
    client, run_id = logger.experiment, str(logger.run_id)
    picture = client.download_artifacts(run_id, "pipeline/schedule.png", str(folder))
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    return [
        [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]
        for name in ("perf/bubble", "perf/bubble_theory")
    ]


def test_bubbles_and_a_picture_of_the_schedule_are_logged(pool: WorkerPool, mlflow_folder: Path) -> None:
    measured, theory = pool.run(run_logged, 4, mlflow_folder)[0]
    assert [step for step, _ in measured] == [1, 3, 4]
    assert all(0 < bubble < 1 for _, bubble in measured)
    assert theory == [(step, pytest.approx(1 / 5)) for step in (1, 3, 4)]
