"""Test that one process can stand for a rank of many, on tensors without values."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist._compat import FakeTensor, backend_of, simulated_backend
from lightning_dist.mesh.collectives import any_of_flags, begin_are_same_numbers, group_on_host
from lightning_dist.mesh.consensus import check_agreement, timed_barrier
from lightning_dist.mesh.objects import broadcast_object, gather_objects
from lightning_dist.plugins.planning.forked import in_fork
from lightning_dist.run.simulation import SimulatedRank, simulate_rank, without_values
from lightning_dist.run.simulation.storages import StorageMeter

_MIB = 2**20


def _simulated(function: Callable[[SimulatedRank], Any], rank: int = 3) -> Any:
    """Return the result of ``function`` in a simulation of 4,096 ranks, in a process of its own."""

    def run() -> Any:
        with simulate_rank(4096, rank, "nccl") as simulation:
            return function(simulation)

    return in_fork(run)


def test_small_tensors_have_values_and_large_ones_do_not() -> None:
    def run(simulation: SimulatedRank) -> Any:
        small, large = torch.arange(100).sum(), torch.ones(1000, 1000)
        product = large[:10, :10] @ torch.ones(10, 10)
        return (
            int(small),
            isinstance(large, FakeTensor),
            isinstance(product, FakeTensor),
            product.shape,
            float(product[0, 0]),
        )

    assert _simulated(run) == (4950, True, True, (10, 10), 0.0)


def test_permutations_have_values_because_samplers_read_all_of_them() -> None:
    def run(simulation: SimulatedRank) -> Any:
        order = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))
        large = torch.ones(100, 100)
        return type(order), sorted(order.tolist()) == list(range(100_000)), large.device, large.t().device.type

    assert _simulated(run) == (torch.Tensor, True, torch.device("cpu"), "cpu")


def test_memory_of_tensors_without_values_is_counted_until_they_are_freed() -> None:
    def run(simulation: SimulatedRank) -> Any:
        meter = simulation.meter
        first = torch.empty(4 * _MIB, dtype=torch.uint8)
        view = first[:10]
        second = torch.empty(_MIB, dtype=torch.float32)
        sizes = [meter.current]
        del first
        sizes.append(meter.current)
        del view
        sizes.append(meter.current)
        second.untyped_storage().resize_(0)
        sizes.append(meter.current)
        return [round(size / _MIB, 2) for size in (*sizes, meter.peak)]

    assert _simulated(run) == [8.0, 8.0, 4.0, 0.0, 8.0]


def test_a_model_of_any_size_can_be_made() -> None:
    def run(simulation: SimulatedRank) -> Any:
        module = nn.Sequential(nn.Linear(100_000, 100_000), nn.LayerNorm(8), nn.Embedding(8, 8))
        without_values(module, simulation)
        gc.collect()
        return all(isinstance(p, FakeTensor) for p in module.parameters()), simulation.meter.current // _MIB

    all_are_fakes, size = _simulated(run)
    assert all_are_fakes
    assert size == 100_000 * 100_001 * 4 // _MIB  # 37 GiB.


def test_ranks_agree_with_themselves() -> None:
    def run(simulation: SimulatedRank) -> Any:
        group = group_on_host(None, "flags")
        check_agreement("the plan", "the same")
        timed_barrier("nothing", 0.1)
        lists = [torch.zeros(1) for _ in range(4096)]
        dist.all_gather(lists, torch.tensor([7.0]))
        return {
            "flags": any_of_flags([True, False, True], group),
            "numbers": begin_are_same_numbers([1, 2], group)(),
            "objects": len(gather_objects("a")),
            "object": broadcast_object("own"),
            "lists": float(sum(lists)),
            "rank": dist.get_rank(),
            "backends": (backend_of(), backend_of(group), simulated_backend()),
        }

    assert _simulated(run) == {
        "flags": [True, False, True],
        "numbers": [True, True],
        "objects": 4096,
        "object": "own",
        "lists": 4096 * 7.0,
        "rank": 3,
        "backends": ("nccl", "nccl", "nccl"),
    }
    assert simulated_backend() is None


def test_a_message_is_what_was_sent_under_its_tag() -> None:
    def run(simulation: SimulatedRank) -> Any:
        received, voted = torch.zeros(2), torch.zeros(1)
        dist.isend(torch.tensor([3.0, 4.0]), 0, tag=5)
        dist.irecv(received, 0, tag=5)
        dist.irecv(voted, 0, tag=6)
        return received.tolist(), voted.tolist()

    assert _simulated(run) == ([3.0, 4.0], [1.0])


def test_a_process_group_that_exists_is_not_replaced() -> None:
    def run(simulation: SimulatedRank) -> Any:
        with simulate_rank(2, 0, "gloo"):
            pass

    with pytest.raises(RuntimeError, match="has a process group already"):
        _simulated(run)


def test_a_resize_elsewhere_is_not_watched() -> None:
    meter = StorageMeter()
    tensor = torch.empty(8, dtype=torch.uint8)
    meter.see(tensor)
    tensor.untyped_storage().resize_(16)
    assert meter.current == 8
    with meter.watching_resizes():
        tensor.untyped_storage().resize_(4)
    assert (meter.current, meter.peak) == (4, 8)


def _die() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_errors_of_a_forked_process_are_raised_here() -> None:
    class OwnError(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")

    def fail() -> None:
        raise OwnError(1, 2)

    with pytest.raises(RuntimeError, match="OwnError: 1 and 2"):
        in_fork(fail)
    with pytest.raises(ValueError, match="invalid literal"):
        in_fork(lambda: int("x"))
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        in_fork(_die)
