"""Generators are seeded and restored as asked, and each microbatch of a pipeline has seeds of its own."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch

from lightning_dist.model.randomness import RngGenerators
from lightning_dist.techniques.pipeline.replay import MicrobatchSeed


def draw() -> list[float]:
    """Draw from the global generators of torch, Python and NumPy."""
    return [float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.randn())]


# NumPy draws normal numbers in pairs, and keeps the second of a pair after an odd number of draws.
@pytest.mark.parametrize("num_drawn", [0, 1, 3])
def test_draws_within_kept_do_not_affect_later_draws(num_drawn: int) -> None:
    generators = RngGenerators(torch.device("cpu"))

    def drawn(has_part: bool) -> list[list[float]]:
        generators.seed(17)
        before = [draw() for _ in range(num_drawn)]
        if has_part:
            with generators.kept():
                generators.seed(23)
                draw()
        return [*before, draw(), draw()]

    with generators.kept():
        assert drawn(has_part=True) == drawn(has_part=False)


def test_the_same_seed_gives_the_same_numbers_and_kept_restores_the_state() -> None:
    generators = RngGenerators(torch.device("cpu"))
    with generators.kept():
        expected = draw()
    found = []
    for _ in range(2):
        with generators.kept():
            draw()
            generators.seed(2**63 - 1)
            found.append(draw())
    assert found[0] == found[1]
    assert draw() == expected


def test_generators_that_are_not_named_are_neither_seeded_nor_restored() -> None:
    generators = RngGenerators(torch.device("cpu"))
    with generators.kept():
        generators.seed(1)
        first = draw()
        generators.seed(1)
        with generators.kept({"torch"}):
            generators.seed(2, {"torch"})
            inside = draw()
        assert inside[0] != first[0]
        assert inside[1:] == first[1:]
        assert float(torch.rand(())) == first[0]


def test_no_two_calls_have_the_same_seed() -> None:
    seeds = {
        MicrobatchSeed(base, microbatch, rank).seed_of_call(call)
        for base, microbatch, rank, call in product((0, 1, 2**62 - 1), range(8), range(8), range(9))
    }
    assert len(seeds) == 3 * 8 * 8 * 9
    assert all(0 <= seed < 2**63 for seed in seeds)
