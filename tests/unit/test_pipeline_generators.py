"""Random numbers of a pipeline's microbatches."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch

from lightning_dist.pipeline.replay import MicrobatchSeed
from lightning_dist.randomness import RngGenerators


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.randn())]


@pytest.mark.parametrize("num_drawn", [0, 1, 3])  # a normal number leaves a second one
def test_numbers_go_on_as_if_none_had_been_drawn(num_drawn: int) -> None:
    numbers = RngGenerators(torch.device("cpu"))

    def drawn(has_part: bool) -> list[list[float]]:
        numbers.seed(17)
        before = [draw() for _ in range(num_drawn)]
        if has_part:
            with numbers.kept():
                numbers.seed(23)
                draw()
        return [*before, draw(), draw()]

    with numbers.kept():
        assert drawn(has_part=True) == drawn(has_part=False)


def test_numbers_follow_from_a_seed_and_leave_no_trace() -> None:
    numbers = RngGenerators(torch.device("cpu"))
    with numbers.kept():
        expected = draw()
    found = []
    for _ in range(2):
        with numbers.kept():
            draw()
            numbers.seed(2**63 - 1)
            found.append(draw())
    assert found[0] == found[1]
    assert draw() == expected


def test_generators_that_are_not_named_are_left_alone() -> None:
    numbers = RngGenerators(torch.device("cpu"))
    with numbers.kept():
        numbers.seed(1)
        first = draw()
        numbers.seed(1)
        with numbers.kept({"torch"}):
            numbers.seed(2, {"torch"})
            inside = draw()
        assert inside[0] != first[0]
        assert inside[1:] == first[1:]
        assert float(torch.rand(())) == first[0]


def test_no_two_calls_have_the_same_seed() -> None:
    seeds = {
        MicrobatchSeed(base, microbatch, rank).of(call)
        for base, microbatch, rank, call in product((0, 1, 2**62 - 1), range(8), range(8), range(9))
    }
    assert len(seeds) == 3 * 8 * 8 * 9
    assert all(0 <= seed < 2**63 for seed in seeds)
