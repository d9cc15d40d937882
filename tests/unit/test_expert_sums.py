"""Test how the tokens of experts are selected, and how their outputs are added up, without any communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from lightning_dist.expert_parallel.dispatch import add_up_weighted, select

NO_GROUP: Any = None
SHAPE = torch.Size((5, 3))
PLACES = {"all pairs": torch.randperm(15, generator=torch.Generator().manual_seed(0)), "some": torch.tensor([7, 0, 12])}


def expected_sum(values: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Add up the values one after another."""
    result = torch.zeros(len(weights), values.size(-1), dtype=values.dtype)
    for value, place in zip(values, places.tolist(), strict=True):
        token, choice = divmod(place, weights.size(-1))
        result[token] += (value * weights[token, choice]).to(values.dtype)
    return result


@pytest.mark.parametrize("pairs", PLACES)
@pytest.mark.parametrize(
    "dtypes", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=["same", "mixed"]
)
def test_outputs_are_weighted_and_added_up(pairs: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    places = PLACES[pairs]
    values = torch.randn(len(places), 4).to(dtypes[0])
    weights = torch.rand(SHAPE).to(dtypes[1])
    result = add_up_weighted(values, weights, places, NO_GROUP)
    assert result.dtype is dtypes[0]
    torch.testing.assert_close(result, expected_sum(values, weights, places))


@pytest.mark.parametrize("pairs", PLACES)
def test_weighted_sums_can_be_differentiated_twice(pairs: str) -> None:
    places = PLACES[pairs]
    values = torch.randn(len(places), 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(SHAPE, dtype=torch.float64, requires_grad=True)

    def run(values: Tensor, weights: Tensor) -> Tensor:
        return add_up_weighted(values, weights, places, NO_GROUP)

    assert gradcheck(run, (values, weights))
    assert gradgradcheck(run, (values, weights))


@pytest.mark.parametrize("pairs", PLACES)
def test_selected_tokens_can_be_differentiated_twice(pairs: str) -> None:
    places = PLACES[pairs]
    tokens = torch.randn(SHAPE[0], 2, dtype=torch.float64, requires_grad=True)

    def run(tokens: Tensor) -> Tensor:
        return select(tokens, places, SHAPE, NO_GROUP).pow(3)  # A linear function has no second derivative.

    torch.testing.assert_close(run(tokens), tokens[places // SHAPE[1]].pow(3))
    assert gradcheck(run, (tokens,))
    assert gradgradcheck(run, (tokens,))


def test_no_tokens_give_no_rows() -> None:
    none = torch.empty(0, dtype=torch.long)
    tokens = torch.empty(0, 4, requires_grad=True)
    selected = select(tokens, none, torch.Size((0, 3)), NO_GROUP)
    result = add_up_weighted(selected, torch.empty(0, 3), none, NO_GROUP)
    result.sum().backward()
    assert result.shape == (0, 4)
    assert tokens.grad is not None
    assert tokens.grad.shape == (0, 4)
