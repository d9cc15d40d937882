"""Test that the project's collectives give torch's results up to rounding, and the same bits on every run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dist.mesh.collectives import (
    DirectAllGather,
    FlaggedBroadcast,
    TwoShotReduceScatter,
    any_of_flags,
    begin_are_same_numbers,
)
from lightning_dist.run.parity import whole_parameters
from tests.distributed.fit import make_trainer
from tests.models import build
from tests.pool import RankFailed, WorkerPool

# This number of elements per rank is neither a power of two nor a multiple of the size of a vector register.
NUMEL = 1003


def chunks(dtype: torch.dtype, world_size: int) -> torch.Tensor:
    """Make the inputs of all ranks, with the dimensions (rank, chunk, element).

    Their magnitudes are from 1e-3 to 1e3, so that rounding shows.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (world_size, world_size, NUMEL)
    values = torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 3)
    return values.to(dtype)


def reduce_scatter(dtype: torch.dtype, average: bool) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    mine = chunks(dtype, world_size)[rank].flatten()
    two_shot, again, torchs = (torch.empty(NUMEL, dtype=dtype) for _ in range(3))
    sent = mine.clone()
    TwoShotReduceScatter()(two_shot, sent, dist.group.WORLD, op)
    TwoShotReduceScatter()(again, sent, dist.group.WORLD, op)
    assert torch.equal(sent, mine), "the input was changed"
    dist.reduce_scatter_tensor(torchs, mine, op=op)
    return {"two_shot": two_shot, "again": again, "torch": torchs}


@pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_shot_reduce_scatter_equals_torchs_up_to_rounding(
    pool: WorkerPool, world_size: int, dtype: torch.dtype, average: bool
) -> None:
    """Check that the error of both implementations is within the bound that holds for any order of summation.

    Summing n numbers in any order has an error of at most (n - 1) eps times the sum of their magnitudes (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2). Averaging rounds once more.
    """
    ranks = pool.run(reduce_scatter, world_size, dtype, average)
    inputs = chunks(dtype, world_size).double()
    divisor = world_size if average else 1
    exact, magnitude = inputs.sum(0) / divisor, inputs.abs().sum(0) / divisor
    bound = world_size * torch.finfo(dtype).eps * magnitude
    for rank, result in enumerate(ranks):
        assert ((result["two_shot"].double() - exact[rank]).abs() <= bound[rank]).all()
        assert ((result["torch"].double() - exact[rank]).abs() <= bound[rank]).all()
        if world_size == 2:
            assert torch.equal(result["two_shot"], result["torch"]), "two numbers have the same sum in either order"


def test_two_shot_reduce_scatter_gives_the_same_bits_on_every_run(pool: WorkerPool) -> None:
    first = pool.run(reduce_scatter, 4, torch.float32, True)
    second = pool.run(reduce_scatter, 4, torch.float32, True)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one["two_shot"], one["again"])
        assert torch.equal(one["two_shot"], two["two_shot"])


def refuse(async_op: bool, op: dist.ReduceOp.RedOpType) -> None:
    dist.init_process_group("gloo")
    TwoShotReduceScatter()(torch.empty(2), torch.empty(4), dist.group.WORLD, op, async_op)


@pytest.mark.parametrize(("async_op", "op"), [(True, dist.ReduceOp.SUM), (False, dist.ReduceOp.MAX)])
def test_two_shot_reduce_scatter_refuses_asynchronous_calls_and_other_operations(
    pool: WorkerPool, async_op: bool, op: dist.ReduceOp.RedOpType
) -> None:
    with pytest.raises(RankFailed, match="NotImplementedError"):
        pool.run(refuse, 2, async_op, op)


def gather(dtype: torch.dtype, in_place: bool, async_op: bool) -> tuple[bool, bool]:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = chunks(dtype, world_size)[0]
    output = torch.zeros(world_size * NUMEL, dtype=dtype)
    mine = output.chunk(world_size)[rank] if in_place else torch.empty(NUMEL, dtype=dtype)
    mine.copy_(inputs[rank])
    work = DirectAllGather()(output, mine, dist.group.WORLD, async_op)
    if work is not None:
        work.wait()
    return torch.equal(output, inputs.flatten()), torch.equal(mine, inputs[rank])


@pytest.mark.parametrize(
    ("dtype", "in_place", "async_op"),
    [(torch.float32, True, False), (torch.bfloat16, False, False), (torch.float64, True, True)],
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_direct_all_gather_gathers_and_keeps_its_input(
    pool: WorkerPool, world_size: int, dtype: torch.dtype, in_place: bool, async_op: bool
) -> None:
    assert pool.run(gather, world_size, dtype, in_place, async_op) == [(True, True)] * world_size


def train(is_direct: bool) -> dict[str, torch.Tensor]:
    model = build("gpt", seed=0)
    make_trainer("2x2", {"direct_collectives": is_direct}, max_steps=20, precision="64-true").fit(model)
    return whole_parameters(model)


@pytest.mark.thorough
@pytest.mark.gloo
def test_direct_collectives_and_torchs_train_to_the_same_weights(pool: WorkerPool) -> None:
    ours, torchs = pool.run(train, 4, True)[0], pool.run(train, 4, False)[0]
    assert ours.keys() == torchs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(
            weight, torchs[name], rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


def flags_of(rank: int, number: int) -> list[bool]:
    """Make flags of which about a third are set on a rank."""
    return torch.rand(number, generator=torch.Generator().manual_seed(rank)).lt(1 / 3).tolist()


def any_of_ranks(number: int) -> list[bool]:
    dist.init_process_group("gloo")
    return any_of_flags(flags_of(dist.get_rank(), number), dist.group.WORLD)


@pytest.mark.parametrize("number", [0, 1, 63, 64, 200])
def test_a_flag_is_set_if_any_rank_has_set_it(pool: WorkerPool, number: int) -> None:
    expected = [any(of_ranks) for of_ranks in zip(*(flags_of(rank, number) for rank in range(3)), strict=True)]
    assert pool.run(any_of_ranks, 3, number) == [expected] * 3


def compare_numbers(rows: list[list[int]]) -> list[bool]:
    dist.init_process_group("gloo")
    return begin_are_same_numbers([row[dist.get_rank()] for row in rows], dist.group.WORLD)()


def test_a_number_that_differs_in_any_bit_on_any_rank_is_not_the_same(pool: WorkerPool) -> None:
    largest = 2**32 - 1
    same = [[number] * 3 for number in (0, 1, 2**31, largest, 1_234_567_890)]
    different = [[0, 0, largest], [largest, largest - 1, largest], [2**31, 0, 0], [5, 5, 7], [1, 2, 4]]
    assert pool.run(compare_numbers, 3, same + different) == [[True] * 5 + [False] * 5] * 3


CONTENTS = [b"small", b"x" * 5000, b"\0" * 1016, b"y" * 20_000, b""]  # Some are larger than all before them.


def broadcast_bytes(source: int, flags: list[list[int]]) -> list[tuple[bytes, bool]]:
    dist.init_process_group("gloo")
    broadcast, rank = FlaggedBroadcast(dist.group.WORLD, source), dist.get_rank()
    return [
        broadcast(content if rank == source else b"of nobody", rank in set_on)
        for content, set_on in zip(CONTENTS, flags, strict=True)
    ]


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast_bytes_and_flags_reach_all_ranks(pool: WorkerPool, source: int) -> None:
    flags = [[], [0], [1, 2], [2], []]
    for received in pool.run(broadcast_bytes, 3, source, flags):
        assert received == [(content, bool(set_on)) for content, set_on in zip(CONTENTS, flags, strict=True)]
