"""Test that microbatches accumulate their gradients, which are then reduced together."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_dist.techniques.sharding import _compat as fsdp2
from tests.distributed.fit import Weights, assert_same, make_trainer, weights_of
from tests.pool import WorkerPool


def accumulate(param_dtype: torch.dtype | None, grouped: bool) -> tuple[list[str], list[torch.Tensor]]:
    """Accumulate the gradients of two microbatches on each of two ranks.

    Returns:
        The dtypes of the outputs, and the gradients averaged over the ranks.
    """
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for unit in [list(model)] if grouped else list(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    root = nn.Sequential(model)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    fsdp2.initialize_root(root)
    groups = [fsdp2.sharded_group(unit) for unit in (model[:1] if grouped else model)]
    dtypes = []
    rank = int(os.environ["RANK"])
    with fsdp2.accumulating(root, groups):
        for group in groups:
            group.gather()
        for number in (1.0, 2.0):
            output = root(torch.full((2, 4), number + 2 * rank))
            dtypes.append(str(output.dtype))
            output.float().square().mean().backward()
    fsdp2.reduce_gradients(root, groups)
    for group in groups:
        group.free()
    return dtypes, [param.grad.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_accumulated_gradients_equal_those_of_one_process(
    pool: WorkerPool, param_dtype: torch.dtype | None, grouped: bool
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for number in (1.0, 2.0, 3.0, 4.0):
        (model(torch.full((2, 4), number)).square().mean() / 2).backward()
    for dtypes, gradients in pool.run(accumulate, 2, param_dtype, grouped):
        assert dtypes == [str(param_dtype or torch.float32)] * 2
        tolerance = 1e-6 if param_dtype is None else 0.05
        for actual, param in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(actual, param.grad, rtol=tolerance, atol=tolerance)


class LateBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, uses_late: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        return self.late(hidden) if uses_late else hidden


class Late(pl.LightningModule):
    """Use a layer of each block only in every second batch, so that it has no gradient in the first of two batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(LateBlock() for _ in range(2))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch, bool(batch_idx % 2))
        return batch.square().mean()

    def train_dataloader(self) -> Any:
        batches = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(batches.chunk(self.trainer.world_size, 1)[self.trainer.global_rank], None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_late(layout: str) -> Weights:
    module = Late()
    kwargs = {} if layout == "auto" else {"reduce_dtype": "float32"}
    make_trainer(layout, kwargs, max_steps=3, precision="64-true", accumulate_grad_batches=2).fit(module)
    return weights_of(module)


def test_parameters_without_a_gradient_in_some_batches_of_an_accumulation_are_reduced(pool: WorkerPool) -> None:
    expected = pool.run(train_late, 1, "auto")[0]
    for weights in pool.run(train_late, 2, "full_shard"):
        assert_same(weights, expected, 1e-5)
