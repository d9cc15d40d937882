"""Test that a technique can be added by one class and one entry in the list, and then works with every strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist import (
    ContextParallelStrategy,
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    NDParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    parallelize,
)
from lightning_dist.parallel_module import parallelized
from lightning_dist.parameters.group import ParameterGroup
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.techniques.protocol import Parallel, Rows, Technique
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.models import build
from tests.pool import WorkerPool

STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "data_parallel": (2, DataParallelStrategy),
    "full_shard": (2, FullShardStrategy),
    "hybrid_shard": (4, lambda: HybridShardStrategy(2, 2)),
    "tensor_parallel": (2, TensorParallelStrategy),
    "context_parallel": (2, ContextParallelStrategy),
    "pipeline_parallel": (2, lambda: PipelineParallelStrategy(num_microbatches=2)),
    "nd_parallel": (4, lambda: NDParallelStrategy(2, tp_size=2, num_microbatches=2)),
}


class Doubling(Technique):
    """Count how often units are gathered, and double the reduced gradients."""

    def __init__(self) -> None:
        self.num_gathers = 0
        self.num_doubled = 0

    def attach(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def on_gather(self, group: ParameterGroup, running: Collection[nn.Module]) -> None:
        assert group.is_gathered
        self.num_gathers += 1

    def after_backward(self, reduces: bool) -> None:
        if not reduces:
            return
        self.num_doubled += 1
        for group in self.parallel.groups:
            for param in group.params:
                if param.grad is not None:
                    param.grad *= 2

    after_microbatches = after_backward

    def state(self) -> dict[str, Any]:
        return {"num_doubled": self.num_doubled}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_doubled = state["num_doubled"]

    def table_rows(self) -> Rows:
        yield "doubling", "all gradients"


def doubled(name: str, folder: Path, resumes: bool) -> tuple[Weights, int, int, str]:
    """Train two optimizer steps with the technique, and save, or resume and train two more.

    Args:
        name: Key of :data:`STRATEGIES`.
        folder: Folder of the checkpoint.
        resumes: Whether to resume from the checkpoint of an earlier call.

    Returns:
        The weights, the technique's two counters, and the start-up table.
    """
    own = parallelize._techniques
    with patch.object(parallelize, "_techniques", lambda *args: [Doubling(), *own(*args)]):
        model = build("gpt", optimizer="plain_sgd")
        trainer = make_trainer(
            "auto", strategy=STRATEGIES[name][1](), max_steps=4 if resumes else 2, accumulate_grad_batches=2,
            precision="64-true",
        )  # fmt: skip
        path = folder / "two_steps.ckpt"
        parts = trainer.distributed_sampler_kwargs
        data = TensorDataset(*model.data())
        sampler = DistributedSampler(data, shuffle=False, **parts)
        loader = DataLoader(data, 8 // parts["num_replicas"], sampler=sampler)
        trainer.fit(model, loader, ckpt_path=path if resumes else None)
        if not resumes:
            trainer.save_checkpoint(path)
            trainer.strategy.wait_for_checkpoints()
    parallel = parallelized(model)
    assert parallel is not None
    technique = parallel.get(Doubling)
    assert technique is not None
    table = startup_table(trainer.strategy, parallel)
    return weights_of(model), technique.num_gathers, technique.num_doubled, table


def in_one_process() -> Weights:
    """Train in one process without the technique, but with twice the learning rate, which has the same effect."""

    class TwiceAsFast(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 2

    model = build("gpt", optimizer="plain_sgd")
    trainer = make_trainer(
        "auto", max_steps=4, accumulate_grad_batches=2, precision="64-true", callbacks=[TwiceAsFast()]
    )
    trainer.fit(model, DataLoader(TensorDataset(*model.data()), 8))
    return weights_of(model)


@pytest.fixture(scope="module")
def expected(pool: WorkerPool) -> Weights:
    return pool.run(in_one_process, 1)[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_added_technique_changes_gradients_is_resumed_and_appears_in_the_table(
    pool: WorkerPool, name: str, expected: Weights, tmp_path: Path
) -> None:
    num_ranks = STRATEGIES[name][0]
    for _, num_gathers, num_doubled, table in pool.run(doubled, num_ranks, name, tmp_path, False):
        assert num_gathers > 0
        assert num_doubled == 2
        assert "  doubling    all gradients" in table.splitlines()
    weights: Weights = {}
    for own, _, num_doubled, _ in pool.run(doubled, num_ranks, name, tmp_path, True):
        assert num_doubled == 4
        weights |= own
    assert_same(weights, expected)
