"""The benchmark's two sides take turns, and its statistics are right."""

from __future__ import annotations

import operator
import random
from statistics import median
from threading import get_ident

import pytest
import torch
import torch.distributed as dist

from tests.bench.convergence import steps_until
from tests.bench.harness import EndStep, Pace, Pairs, alternate, compare_steps, median_interval


@pytest.mark.parametrize(
    ("num_values", "expected"),
    # These are the ranks of the two order statistics among the sorted values, from tables of the sign test.
    [(5, None), (6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (50, (18, 33))],
)
def test_the_interval_of_the_median_is_that_of_the_sign_test(num_values: int, expected: tuple[int, int] | None) -> None:
    values = list(range(num_values, 0, -1))
    assert median_interval(values) == expected


def test_the_interval_contains_the_median_as_often_as_its_confidence_says() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([draw.expovariate(1.0) for _ in range(20)])
        hits += low <= 0.6931 <= high
    # The interval of 20 values covers 95.9%; 2000 trials have a standard error of 0.45%.
    assert hits / 2000 == pytest.approx(0.959, abs=0.015)


def test_the_order_of_the_sides_is_swapped_from_pair_to_pair() -> None:
    calls: list[str] = []

    def side(name: str, value: float) -> float:
        calls.append(name)
        return value

    pairs = alternate(lambda: side("a", 3.0), lambda: side("b", 2.0), Pairs(), lambda pairs: len(pairs) == 3)
    assert "".join(calls) == "abbaab"
    assert pairs.ours == [3.0] * 3
    assert pairs.median == 1.5
    assert Pairs([3.0], [2.0], by=operator.sub).median == 1.0


def test_measuring_stops_when_there_are_enough_pairs_and_the_interval_is_narrow_or_time_is_up() -> None:
    def figures(spread: float, num_pairs: int) -> Pairs:
        return Pairs([1 + spread * (i % 2) for i in range(num_pairs)], [1.0] * num_pairs)

    is_enough = Pace(min_pairs=10, max_width=0.04, max_seconds=60).stop_rule()
    assert not is_enough(figures(0.01, 9))
    assert is_enough(figures(0.01, 10))
    assert not is_enough(figures(0.1, 10))
    out_of_time = Pace(min_pairs=10, max_width=0.04, max_seconds=-1).stop_rule()
    assert not out_of_time(Pairs())
    assert out_of_time(figures(0.1, 1))


@pytest.fixture
def one_rank() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


PACE = Pace(min_pairs=6, max_width=1e9, max_seconds=60, steps=2, warmup_turns=1)


def test_runs_take_turns(one_rank: None) -> None:
    moves: list[str] = []
    threads: dict[str, set[int]] = {"a": set(), "b": set()}

    def run(name: str, end_step: EndStep) -> None:
        moves.append(name.upper())
        go_on = True
        while go_on:
            moves.append(name)
            threads[name].add(get_ident())
            go_on = end_step(torch.tensor(1.0))
        moves.append(name.upper())

    pairs = compare_steps(lambda end: run("a", end), lambda end: run("b", end), PACE, True)
    assert "".join(moves) == "AaaBbb" + ("aabb" + "bbaa") * 3 + "AB"
    assert len(pairs) == 6
    assert median(pairs.ours) > 0
    assert len(threads["a"] | threads["b"]) == 2


def test_runs_that_do_not_do_the_same_work_are_refused(one_rank: None) -> None:
    def run(losses: list[float], end_step: EndStep) -> None:
        for loss in [*losses, *[losses[-1]] * 100]:
            if not end_step(torch.tensor(loss)):
                return

    with pytest.raises(AssertionError, match=r"different losses at step 8, 1\.5.* and 1\.4"):
        compare_steps(lambda end: run([2.0, 1.5], end), lambda end: run([2.0, 1.4], end), PACE, True)
    with pytest.raises(AssertionError, match="different losses at step 0"):
        compare_steps(lambda end: run([2.1, 1.5], end), lambda end: run([2.0, 1.5], end), PACE, True)


def test_an_error_or_an_early_end_of_a_run_is_raised(one_rank: None) -> None:
    def broken(end_step: EndStep) -> None:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        compare_steps(broken, broken, PACE, True)
    with pytest.raises(AssertionError, match="ended by itself"):
        compare_steps(lambda end_step: None, broken, PACE, True)


def test_the_steps_until_a_loss_are_interpolated() -> None:
    losses = {20: 3.0, 40: 2.5, 60: 1.5, 80: 2.5}
    assert steps_until(2.0, losses) == 50
    assert steps_until(2.0, {str(step): loss for step, loss in losses.items()}) == 50  # These are the keys in JSON.
    assert steps_until(4.0, losses) == 20
    assert steps_until(1.0, losses) is None
