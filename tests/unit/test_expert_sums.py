"""Test how the tokens of experts are selected, and how their outputs are added up, without any communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from lightning_dist.techniques.expert_parallel.capacity import places_of_experts
from lightning_dist.techniques.expert_parallel.dispatch import Pairs, add_up_weighted, select

NO_GROUP: Any = None
SHAPE = torch.Size((5, 3))
PAIRS = {
    "all pairs": Pairs(torch.randperm(15, generator=torch.Generator().manual_seed(0)), SHAPE),
    "some": Pairs(torch.tensor([7, 0, 12]), SHAPE),
    "gaps": Pairs(torch.tensor([15, 7, 0, 15, 12, 15]), SHAPE, has_gaps=True),
    "gaps beside all": Pairs(torch.tensor([15, *range(14, -1, -1), 15]), SHAPE, has_gaps=True),
}


def expected_sum(values: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
    """Add up the values, which are rounded when they are weighted, and once at the end."""
    result = torch.zeros(len(weights), values.size(-1), dtype=torch.float64)
    for value, place in zip(values, pairs.numbers.tolist(), strict=True):
        if place == SHAPE.numel():
            continue
        token, choice = divmod(place, weights.size(-1))
        result[token] += (value * weights[token, choice]).to(values.dtype)
    return result.to(values.dtype)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "dtypes", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=["same", "mixed"]
)
def test_outputs_are_weighted_and_added_up(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    pairs = PAIRS[name]
    values = torch.randn(len(pairs.numbers), 4).to(dtypes[0])
    weights = torch.rand(SHAPE).to(dtypes[1])
    result = add_up_weighted(values, weights, pairs, NO_GROUP)
    assert result.dtype is dtypes[0]
    torch.testing.assert_close(result, expected_sum(values, weights, pairs))


@pytest.mark.parametrize("name", PAIRS)
def test_weighted_sums_can_be_differentiated_twice(name: str) -> None:
    pairs = PAIRS[name]
    values = torch.randn(len(pairs.numbers), 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(SHAPE, dtype=torch.float64, requires_grad=True)

    def run(values: Tensor, weights: Tensor) -> Tensor:
        return add_up_weighted(values, weights, pairs, NO_GROUP)

    assert gradcheck(run, (values, weights))
    assert gradgradcheck(run, (values, weights))


@pytest.mark.parametrize("name", PAIRS)
def test_selected_tokens_can_be_differentiated_twice(name: str) -> None:
    pairs = PAIRS[name]
    tokens = torch.randn(SHAPE[0], 2, dtype=torch.float64, requires_grad=True)

    def run(tokens: Tensor) -> Tensor:
        return select(tokens, pairs, NO_GROUP).pow(3)  # A linear function has no second derivative.

    padded = torch.cat((tokens, torch.zeros(1, 2, dtype=torch.float64)))
    torch.testing.assert_close(run(tokens), padded[pairs.numbers // SHAPE[1]].pow(3))
    assert gradcheck(run, (tokens,))
    assert gradgradcheck(run, (tokens,))


@pytest.mark.parametrize("num_gaps", [0, 4])
def test_no_tokens_give_no_output(num_gaps: int) -> None:
    none = Pairs(torch.zeros(num_gaps, dtype=torch.long), torch.Size((0, 3)), has_gaps=num_gaps > 0)
    tokens = torch.empty(0, 4, requires_grad=True)
    selected = select(tokens, none, NO_GROUP)
    assert not selected.any()
    result = add_up_weighted(selected, torch.empty(0, 3), none, NO_GROUP)
    result.sum().backward()
    assert result.shape == (0, 4)
    assert tokens.grad is not None
    assert tokens.grad.shape == (0, 4)


def test_the_first_tokens_of_an_expert_take_its_places() -> None:
    index = torch.tensor([[2, 0], [0, 1], [0, 5], [2, 0]])  # 5 stands for no expert.
    pairs = places_of_experts(index, 0, 3, 2)
    assert pairs.has_gaps
    assert pairs.numbers.tolist() == [1, 2, 3, 8, 0, 6]  # Expert 0 has no place for its third and fourth token.
    assert places_of_experts(index, 1, 2, 3).numbers.tolist() == [3, 8, 8, 0, 6, 8]
    assert places_of_experts(index[:0], 0, 3, 2).numbers.tolist() == [0] * 6
