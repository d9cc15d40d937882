"""Test that metrics are reduced as by Lightning's own strategies, and without barriers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available

from lightning_dist.plugins.strategies.metric_reduction import reduce_metric
from tests.distributed.fit import make_trainer
from tests.models import GPT
from tests.pool import WorkerPool

OPERATIONS = ("mean", "avg", "AVG", "sum", "min", "max", "product", dist.ReduceOp.SUM, dist.ReduceOp.MAX)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def reduced() -> list[tuple[str, torch.Tensor, torch.Tensor, bool]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    results = []
    for group in (None, pair):
        for operation in OPERATIONS:
            for dtype in DTYPES:
                if group is pair and rank > 1:
                    continue
                ours, theirs = (torch.tensor([rank + 1, 3 * rank, 2]).to(dtype) for _ in range(2))
                result = reduce_metric(ours, group, operation)
                expected = _sync_ddp_if_available(theirs, group, reduce_op=operation)
                results.append((f"{operation} {dtype}", result, expected, result is ours))
    return results


def test_results_are_those_of_lightning(pool: WorkerPool) -> None:
    for results in pool.run(reduced, 3):
        for name, result, expected, is_in_place in results:
            assert is_in_place, name
            assert result.dtype == expected.dtype and torch.equal(result, expected), name


def without_group() -> tuple[float, str]:
    value = float(reduce_metric(torch.tensor(2.0), None, "mean"))
    dist.init_process_group("gloo")
    default = float(reduce_metric(torch.tensor(2.0), None, None))
    with pytest.raises(ValueError, match="reduce_op='median' must be 'mean', 'sum'") as error:
        reduce_metric(torch.tensor(2.0), None, "median")
    assert default == 4.0
    return value, str(error.value)


def test_without_a_group_nothing_is_reduced_and_unknown_names_are_refused(pool: WorkerPool) -> None:
    assert [value for value, _ in pool.run(without_group, 2)] == [2.0, 2.0]


class Logging(GPT):
    def __init__(self, num_logs: int) -> None:
        super().__init__()
        self.num_logs = num_logs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        for number in range(self.num_logs):
            self.log(f"train/{number}", loss * number, sync_dist=True)
        return loss


def barriers(layout: str, num_logs: int) -> tuple[int, dict[str, float]]:
    barrier, num = dist.barrier, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num
        num += 1
        return barrier(*args, **kwargs)

    dist.barrier = counted
    try:
        trainer = make_trainer(layout, max_steps=3, limit_val_batches=0)
        trainer.fit(Logging(num_logs))
    finally:
        dist.barrier = barrier
    return num, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_logged_metrics_cost_no_barrier(pool: WorkerPool) -> None:
    (few, _), _ = pool.run(barriers, 2, "full_shard", 0)
    for many, logged in pool.run(barriers, 2, "full_shard", 3):
        assert many == few
        assert logged["train/2"] == pytest.approx(2 * logged["train/1"])
