"""Test that ranks which take different actions all raise an error, and that equal actions exchange the right data."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_dist.mesh.collectives import DirectAllGather
from lightning_dist.techniques.sharding import same_path
from lightning_dist.techniques.sharding.same_path import RanksDivergeError, SamePath
from tests.pool import WorkerPool

UNITS = {"a": 1003, "b": 40, "c": 7, "d": 1}
"""Names of units and the number of float32 elements that each rank gathers of them."""

STEP = "abcdcba"


def walk(steps_of_ranks: list[list[str]], together: bool = False) -> tuple[str | None, list[bool], int]:
    """Gather the units of steps, and check the data.

    Args:
        steps_of_ranks: For each rank, the units that each step gathers.
        together: Whether all gathers of a step begin before the first one is waited for, and not one after another.

    Returns:
        The error, whether the data of each gather were right, and the number of comparisons between the ranks.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path, asked, is_right = SamePath(list(UNITS)), Counter[int](), list[bool]()

    def counted(*args: object, transfer: object = same_path.exchange) -> None:
        asked[args[-1]] += 1  # type: ignore[index]
        transfer(*args)  # type: ignore[operator]

    def check(work: dist.Work | None, output: torch.Tensor, values: torch.Tensor) -> None:
        assert work is not None
        work.wait()
        is_right.append(torch.equal(output, values.flatten()))

    num_begun = 0
    same_path.exchange, before = counted, same_path.exchange  # type: ignore[assignment]
    try:
        for step in steps_of_ranks[rank]:
            begun: list[tuple[dist.Work | None, torch.Tensor, torch.Tensor]] = []
            for unit in step:
                size = UNITS[unit]
                values = torch.randn(world_size, size, generator=torch.Generator().manual_seed(num_begun))
                num_begun += 1
                output = torch.empty(world_size * size)
                gather = DirectAllGather(partial(path.begin, "gather", list(UNITS).index(unit)))
                begun.append((gather(output, values[rank].clone(), dist.group.WORLD), output, values))
                if not together:
                    check(*begun.pop())
            for transfer in reversed(begun):  # The last one ends those that have begun before it.
                check(*transfer)
            flags = torch.zeros(world_size, 24, dtype=torch.uint8)
            path.exchange("end", 0, flags, [flags[rank]] * world_size, dist.group.WORLD)
    except RanksDivergeError as error:
        return str(error), is_right, asked[same_path._FIRST_TAG]
    finally:
        same_path.exchange = before
    return None, is_right, asked[same_path._FIRST_TAG]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_tell_each_other_their_actions_only_where_these_are_new(pool: WorkerPool, world_size: int) -> None:
    steps = ["abab", "abab", "abab", "ab", "ab", "abab"]
    for error, is_right, asked in pool.run(walk, world_size, [steps] * world_size):
        assert error is None
        assert is_right == [True] * 20
        # These are the actions of the first step, and wherever a step's end came earlier or later than expected.
        assert asked < 14


@pytest.mark.parametrize(("world_size", "together"), [(2, False), (3, False), (3, True)])
def test_all_ranks_may_change_their_path_together(pool: WorkerPool, world_size: int, together: bool) -> None:
    steps = [STEP, STEP, "abba", STEP, "d", "dd", "cba", STEP, STEP]
    for error, is_right, _ in pool.run(walk, world_size, [steps] * world_size, together):
        assert error is None
        assert is_right == [True] * sum(map(len, steps))


@pytest.mark.parametrize(
    ("others", "divergent", "first", "second"),
    [
        ([STEP, "ab"], [STEP, "b"], r"gather a \(4012 bytes\)", r"gather b \(160 bytes\)"),
        ([STEP] * 4, [*[STEP] * 3, "abdcba"], r"gather c \(28 bytes\)", r"gather d \(4 bytes\)"),
        (
            [STEP] * 4,
            [*[STEP] * 3, "abcdc"],
            r"gather b \(160 bytes\)",
            r"end the forward or the backward \(24 bytes\)",
        ),
        (
            [STEP] * 4,
            [*[STEP] * 3, STEP + "a"],
            r"end the forward or the backward \(24 bytes\)",
            r"gather a \(4012 bytes\)",
        ),
        ([*[STEP] * 3, "bb"], [*[STEP] * 3, "cc"], r"gather b \(160 bytes\)", r"gather c \(28 bytes\)"),
    ],
    ids=["first", "skips", "ends_early", "ends_late", "both_change"],
)
@pytest.mark.parametrize(("world_size", "together"), [(2, False), (3, False), (2, True), (3, True)])
def test_different_actions_raise_an_error_on_all_ranks(
    pool: WorkerPool,
    world_size: int,
    together: bool,
    others: list[str],
    divergent: list[str],
    first: str,
    second: str,
) -> None:
    for error, is_right, _ in pool.run(walk, world_size, [*[others] * (world_size - 1), divergent], together):
        assert error is not None
        assert re.search(f"rank 0 is about to {first}, and rank {world_size - 1} to {second}", error), error
        assert all(is_right)
