"""The operations that a model needs do not depend on how it is distributed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_dist import (
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_dist.plugins.callbacks import StepTelemetry
from lightning_dist.plugins.callbacks.telemetry import step_telemetry
from tests.accelerator import place
from tests.distributed.test_step_times import Recording
from tests.models import CONTEXT, GPT, VOCAB
from tests.pool import WorkerPool
from tests.split_models import Example
from tests.thorough import one_in

TOKENS = 8 * CONTEXT
# The matrices of a layer, the number of products of attention per token divided by two, and the head's matrix.
GPT_BLOCKS, GPT_ATTENTION, GPT_HEAD = 2 * 8 * 20**2, 2 * CONTEXT * 20, VOCAB * 20
EXAMPLE_BLOCKS, EXAMPLE_ATTENTION, EXAMPLE_HEAD = 2 * (4 * 24**2 + 3 * 24 * 40), 2 * CONTEXT * 24, 256 * 24


def needed(blocks: int, attention: int, head: int) -> int:
    """Return the operations of a step of a GPT with so many weights."""
    return TOKENS * (6 * (blocks + head) + 12 * attention)


CASES: dict[str, tuple[Callable[[], Any], type[pl.LightningModule], int]] = {
    "ddp": (lambda: "ddp", GPT, 0),
    "data_parallel": (lambda: DataParallelStrategy(), GPT, 0),
    "full_shard": (lambda: FullShardStrategy(), GPT, 0),
    "recomputed": (
        lambda: FullShardStrategy(activation_checkpointing="full"), GPT, TOKENS * (2 * GPT_BLOCKS + 4 * GPT_ATTENTION)
    ),
    "compiled": (lambda: FullShardStrategy(compile="aot_eager"), GPT, 0),
    "replicas of shards": (lambda: HybridShardStrategy(2, 2), GPT, 0),
    "pipeline": (lambda: PipelineParallelStrategy(2, num_microbatches=4), GPT, 0),
    "tensor": (lambda: TensorParallelStrategy(2), Example, 0),
    "tensor, whole sequence": (lambda: TensorParallelStrategy(2, sequence_parallel=False), Example, 0),
    "tensor, whole head": (
        lambda: TensorParallelStrategy(2, plan={"model.head": "replicate"}), Example, TOKENS * 6 * EXAMPLE_HEAD
    ),
}  # fmt: skip
"""For each case its strategy, its model, and the operations that devices run besides those that the model needs."""


def figures(name: str) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Return the operations in a step, of the model and of the hardware, on every rank, and the logged metrics."""
    make_strategy, module, _ = CASES[name]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen, gather = [], step_telemetry.gather

    def recorded(*args: Any) -> Any:
        seen.append(gather(*args))
        return seen[-1]

    step_telemetry.gather = recorded
    logger = Recording()
    trainer = pl.Trainer(
        **place(),
        strategy=make_strategy(),
        max_steps=3,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[StepTelemetry(3)],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module())
    finally:
        step_telemetry.gather = gather
    ((ranks, _),) = seen
    (metrics,) = (metrics for metrics in logger.logged if "perf/mfu" in metrics)
    # The first step is left out, so that two steps are in the interval.
    return [(rank.model_tflop * 1e12 / 2, rank.hardware_tflop * 1e12 / 2) for rank in ranks], metrics


@pytest.mark.parametrize("name", one_in(3, [name for name in CASES if name != "replicas of shards"]))
def test_operations_of_all_ranks_are_those_of_the_model(pool: WorkerPool, name: str) -> None:
    _, module, more = CASES[name]
    is_gpt = module is GPT
    attention = GPT_ATTENTION if is_gpt else EXAMPLE_ATTENTION
    model = needed(*((GPT_BLOCKS, attention, GPT_HEAD) if is_gpt else (EXAMPLE_BLOCKS, attention, EXAMPLE_HEAD)))
    hardware = model + more + 2 * TOKENS * attention  # The backward of fused attention computes the scores again.
    for ranks, metrics in pool.run(figures, 2, name):
        assert sum(rank for rank, _ in ranks) == pytest.approx(model, rel=1e-4)
        assert sum(rank for _, rank in ranks) == pytest.approx(hardware, rel=1e-4)
        assert metrics["perf/hfu"] / metrics["perf/mfu"] == pytest.approx(hardware / model, rel=1e-4)
        assert 0 < metrics["perf/mfu"] < 1


NUM_PARAMS = sum(param.numel() for param in GPT().parameters() if param.requires_grad)


@pytest.mark.parametrize(
    ("name", "axis", "num_bytes"),
    [
        # The ranks send half of all gradients twice: to sum them and to tell the sums.
        ("data_parallel", "dp_replicate", 2 * 4 * NUM_PARAMS / 2),
        ("replicas of shards", "dp_replicate", 2 * 4 * (NUM_PARAMS / 2) / 2),
        # One of the two ranks sends the activations of all tokens, and the other one their gradients.
        ("pipeline", "pp", 4 * TOKENS * 20),
        # A layer has four all-gathers and four reduce-scatters of all tokens, of which a rank sends half, and an
        # all-reduce of the gradients of its two norms. Outside of the blocks, hidden states are whole: they are
        # gathered once in the forward and once in the backward, and summed after the embedding and before the head. The
        # loss has three sums of a number per token.
        ("tensor", "tp", 4 * (TOKENS * (24 / 2 * (2 * 8 + 6) + 3) + 2 * 2 * 24)),
    ],
)
def test_bytes_sent_over_an_axis_are_logged(pool: WorkerPool, name: str, axis: str, num_bytes: float) -> None:
    for _, metrics in pool.run(figures, 4 if name == "replicas of shards" else 2, name):
        assert metrics[f"comm/{axis}_mib_per_step"] * 2**20 == pytest.approx(num_bytes, rel=0.02)
