"""Test that every rank gets the buffers of the first rank, whatever their dtypes and layouts are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_dist.techniques.same_buffers import SameBuffers
from tests.pool import RankFailed, WorkerPool


def buffers(rank: int, num_large: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(3, 4, generator=generator)
    return {
        "single": values,
        "transposed": values.clone().t(),
        "low": values.bfloat16()[0],
        "complex_": torch.complex(values, values + 1),
        "conjugate": torch.complex(values, values + 1).conj(),
        "mask": values > 0,
        "count": torch.tensor(rank),
        "nothing": torch.empty(0, 4),
        "equal": torch.ones(2),
        "large": torch.full((num_large,), float(rank)),
    }


def module_of(rank: int, num_large: int) -> nn.Module:
    module = nn.Module()
    for name, buffer in buffers(rank, num_large).items():
        module.register_buffer(name, buffer)
    return module


def synchronize(shape: tuple[int, ...], num_large: int) -> tuple[dict[str, torch.Tensor], bool]:
    """Synchronize buffers over a mesh; return them, and whether the versions of small ones stayed as they were."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    module = module_of(dist.get_rank(), num_large)
    same_buffers = SameBuffers(mesh)
    same_buffers.attach(SimpleNamespace(module=module))  # type: ignore[arg-type]
    same_buffers.finish()
    versions = {name: buffer._version for name, buffer in module.named_buffers()}
    same_buffers.synchronize()
    return (
        {name: buffer.clone() for name, buffer in module.named_buffers()},
        versions == {name: buffer._version for name, buffer in module.named_buffers()},
    )


@pytest.mark.parametrize("num_large", [5, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_all_ranks_get_the_buffers_of_the_first_one(pool: WorkerPool, shape: tuple[int, ...], num_large: int) -> None:
    expected = buffers(0, num_large)
    for found, keeps_versions in pool.run(synchronize, 2 ** len(shape), shape, num_large):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert keeps_versions or num_large > 5


def remove_all(is_cleared: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    module: Any = nn.Module()
    module.register_buffer("mask", torch.ones(3))
    same_buffers = SameBuffers(mesh)
    same_buffers.attach(SimpleNamespace(module=module))  # type: ignore[arg-type]
    same_buffers.finish()
    if is_cleared:
        module.mask = None
    else:
        del module.mask
    same_buffers.synchronize()


@pytest.mark.parametrize("is_cleared", [True, False], ids=["None", "deleted"])
def test_buffers_may_be_removed(pool: WorkerPool, is_cleared: bool) -> None:
    pool.run(remove_all, 2, is_cleared)


def resize_on_one_rank() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    module: Any = nn.Module()
    module.register_buffer("bank", torch.ones(3))
    module.register_buffer("after", torch.ones(3))
    same_buffers = SameBuffers(mesh)
    same_buffers.attach(SimpleNamespace(module=module))  # type: ignore[arg-type]
    same_buffers.finish()
    if dist.get_rank() == 1:
        module.bank = torch.ones(7)
    same_buffers.synchronize()


def test_a_buffer_of_another_size_on_one_rank_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed, match=r"other sizes on this rank: 'bank' \[7\], 'after' \[3\]"):
        pool.run(resize_on_one_rank, 2)
