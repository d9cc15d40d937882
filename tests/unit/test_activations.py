"""Test the modes of activation checkpointing, and the results that ``selective`` keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist.activation_checkpointing.saved_operations import selective_contexts
from lightning_dist.plugins.strategies.activations import checkpointing_mode


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, ""),
        ("none", ""),
        (True, "0123456789"),
        ("full", "0123456789"),
        ("selective", "0123456789"),
        ("offload", "0123456789"),
        ({"every": 1}, "0123456789"),
        ({"every": 3}, "258"),
        ({"budget": 0.5}, "13579"),
        ({"budget": 0.3}, "1245789"),
        ({"budget": 0}, "0123456789"),
        ({"budget": 1}, ""),
    ],
)
def test_a_mode_chooses_blocks_that_are_spread_evenly(value: Any, expected: str) -> None:
    mode = checkpointing_mode(value)
    assert "".join(str(index) for index in range(10) if mode and mode.chooses(index)) == expected


@pytest.mark.parametrize(
    "value", ["some", 2, {"every": 0}, {"every": 1.5}, {"budget": 1.1}, {"every": 2, "budget": 0.5}, {"size": 1}, {}]
)
def test_other_modes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be one of 'none', 'full', 'selective', 'offload', True"):
        checkpointing_mode(value)


class Layers(nn.Module):
    """Compute two matrix products, and change the result of the first one in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.num_calls = 0
        self.last_of_first: Tensor | None = None

    def forward(self, x: Tensor, num_products: int = 2) -> Tensor:
        self.num_calls += 1
        hidden = self.first(x)
        self.last_of_first = hidden
        for _ in range(num_products - 1):
            hidden = self.second(hidden.add_(1.0).sin())
        return hidden


def test_a_kept_result_that_was_changed_in_place_is_computed_again() -> None:
    layers, x = Layers(), torch.randn(4, 8)
    layers(x).sum().backward()
    expected = [param.grad.clone() for param in layers.parameters() if param.grad is not None]
    layers.zero_grad()
    checkpoint(layers, x, use_reentrant=False, context_fn=selective_contexts).sum().backward()
    assert layers.num_calls == 3
    assert all(torch.equal(param.grad, grad) for param, grad in zip(layers.parameters(), expected, strict=True))


def test_every_second_product_is_computed_once() -> None:
    first = nn.Linear(8, 8)
    second = nn.Linear(8, 8)
    counts = {"mm": 0}

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts["mm"] += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return func(*args, **(kwargs or {}))

    def counted(contexts: Any) -> int:
        counts["mm"] = 0
        x = torch.randn(4, 8, requires_grad=True)
        with Count():
            checkpoint(lambda x: second(first(x).sin()).sin(), x, use_reentrant=False, **contexts).sum().backward()
        return counts["mm"]

    assert counted({}) - counted({"context_fn": selective_contexts}) == 1


def test_a_rerun_with_other_operations_is_refused() -> None:
    layers, numbers = Layers(), iter([3, 2])
    output = checkpoint(
        lambda x: layers(x, next(numbers)), torch.randn(4, 8), use_reentrant=False, context_fn=selective_contexts
    )
    with pytest.raises(RuntimeError, match="it computed with other operations than in its forward"):
        output.sum().backward()
