"""Random numbers of a pipeline's microbatches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_dist.pipeline.replay import _Numbers


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.randn())]


@pytest.mark.parametrize("num_drawn", [0, 1, 3, 312])  # a normal number leaves a second one; 312 use up the twister
@pytest.mark.parametrize("draws_inside", [False, True])
def test_a_part_leaves_the_steps_numbers_alone(num_drawn: int, draws_inside: bool) -> None:
    numbers = _Numbers(torch.device("cpu"))

    def drawn(has_part: bool) -> list[list[float]]:
        numbers.seed(17)
        before = [draw() for _ in range(num_drawn)]
        if has_part:
            with numbers.seeded(23):
                if draws_inside:
                    draw()
        return [*before, draw(), draw()]

    assert drawn(has_part=True) == drawn(has_part=False)


def test_all_numbers_of_a_step_follow_from_its_seed_and_leave_no_trace() -> None:
    numbers = _Numbers(torch.device("cpu"))
    np.random.seed(1)
    np.random.randn()
    random.seed(1)
    torch.manual_seed(1)
    with numbers.kept():
        expected = draw()
    found = []
    for _ in range(2):
        with numbers.kept():
            draw()
            numbers.seed(2**63 - 1)
            step = draw()
            with numbers.seeded(5):
                found.append((step, draw()))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert draw() == expected


def test_numbers_inside_of_parts_do_not_depend_on_what_was_drawn_before() -> None:
    numbers = _Numbers(torch.device("cpu"))
    with numbers.kept():
        numbers.seed(3)
        with numbers.seeded(4):
            first = draw()
        draw()
        with numbers.seeded(4):
            assert draw() == first
