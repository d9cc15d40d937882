"""Test the parts of ``lightning-dist check`` that need one process only."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.plugins.parity_check.randomness import switch_off_dropout
from lightning_dist.plugins.parity_check.recording import RecordedBatch, Recording
from lightning_dist.plugins.parity_check.reference import join_batches
from lightning_dist.plugins.parity_check.report import tolerances

Pair = namedtuple("Pair", "first second")


def joined(*parts: Any) -> Any:
    recording = Recording(batches=[[RecordedBatch(part, 0, {})] for part in parts])
    return join_batches(recording).batches[0][0].batch


def test_batches_are_joined_along_their_samples() -> None:
    ones, twos = torch.ones(2, 3), torch.full((2, 3), 2.0)
    both = torch.cat([ones, twos])
    result = joined({"x": [ones, Pair(ones, 5)], "name": "a"}, {"x": [twos, Pair(twos, 5)], "name": "a"})
    torch.testing.assert_close(result["x"][0], both)
    torch.testing.assert_close(result["x"][1].first, both)
    assert (result["x"][1].second, result["name"]) == (5, "a")
    assert isinstance(result["x"][1], Pair)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((torch.ones(2, 3), torch.ones(1, 3)), r"different shapes \(\(2, 3\), \(1, 3\)\)"),
        ((object(), object()), "they have a object"),
        (("a", "b"), "they have a str"),
        ((torch.tensor(1.0), torch.tensor(2.0)), "they have a Tensor"),
    ],
)
def test_batches_that_cannot_be_joined_are_refused(parts: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        joined(*parts)


def test_every_probability_of_dropout_is_switched_off() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout = 0.1  # as in transformers
            self.drop_prob = 0.2  # as in timm
            self.scale = 0.5

    model = nn.Sequential(nn.Dropout(0.3), nn.LSTM(2, 2, 2, dropout=0.4), nn.Dropout(0.0), Attention())
    model.append(nn.MultiheadAttention(4, 2, dropout=0.5))
    assert switch_off_dropout(model) == ["0.p", "1.dropout", "3.attention_dropout", "3.drop_prob", "4.dropout"]
    assert (model[0].p, model[1].dropout, model[3].drop_prob, model[3].scale) == (0, 0, 0, 0.5)
    assert switch_off_dropout(model) == []


def test_the_least_precise_dtype_decides_the_tolerance() -> None:
    assert tolerances({torch.float64}, None).gradients == 1e-10
    assert tolerances({torch.float64, torch.float32}, None).gradients == 1e-4
    assert tolerances({torch.float32, torch.bfloat16}, None).gradients == 0.1
    given = tolerances({torch.float32}, 1e-3)
    assert (given.gradients, given.weights, given.negligible) == (1e-3, 1e-3, 1e-2)
