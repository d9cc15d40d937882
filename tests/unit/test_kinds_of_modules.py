"""Test which modules count as of one kind, so that one trial serves all of them, and what the inputs of experts are."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_dist.model.experts import num_inputs
from lightning_dist.tracing.block_trial import kind_of_module


class Block(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)
        vars(self.mlp).update(settings)


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ({"index": 0}, {"index": 1}, True),
        ({"index": 1}, {"index": 2}, True),
        ({"rate": 0.1}, {"rate": 0.2}, True),
        ({"window": 8}, {"window": 8}, True),
        ({"window": 0}, {"window": 8}, False),
        ({"window": 8}, {"window": 4}, False),
        ({"shift": 0}, {"shift": 0}, False),  # It may be the index of the first block, which is not that of the second.
        ({"causal": True}, {"causal": False}, False),
        ({"causal": True}, {"causal": 1}, False),
        ({"kind": "full"}, {"kind": "local"}, False),
    ],
)
def test_modules_with_equal_settings_are_of_one_kind(first: Any, second: Any, is_same: bool) -> None:
    kinds = kind_of_module(Block(**first), "model.blocks.0"), kind_of_module(Block(**second), "model.blocks.1")
    assert (kinds[0] == kinds[1]) is is_same


def _routed(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor: ...
def _routed_with_others(self: Any, x: Tensor, index: Tensor, weights: Tensor, a: float = 1, **b: Any) -> Tensor: ...
def _routed_or_not(self: Any, x: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> Tensor: ...
def _dense(self: Any, x: Tensor, *, mask: Tensor | None = None) -> Tensor: ...
def _of_two(self: Any, x: Tensor, index: Tensor) -> Tensor: ...
def _of_four(self: Any, x: Tensor, index: Tensor, weights: Tensor, mask: Tensor) -> Tensor: ...
def _with_keyword(self: Any, x: Tensor, index: Tensor, weights: Tensor, *, mask: Tensor) -> Tensor: ...


@pytest.mark.parametrize(
    ("forward", "number"),
    [
        (_routed, 3),
        (_routed_with_others, 3),
        (_routed_or_not, 3),
        (_dense, 1),
        (_of_two, 2),
        (_of_four, 4),
        (_with_keyword, 4),
    ],
)
def test_optional_inputs_of_experts_are_not_counted(forward: Any, number: int) -> None:
    module = type("Experts", (nn.Module,), {"forward": forward})()
    assert num_inputs(module) == number
