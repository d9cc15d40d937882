"""Test the modes of activation checkpointing, and the results that ``selective`` keeps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist.techniques.activation_checkpointing import CheckpointingOptions, offload
from lightning_dist.techniques.activation_checkpointing.copies import Copies, MovedTensor
from lightning_dist.techniques.activation_checkpointing.saved_operations import selective_contexts


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
        ({"budget": 0.5}, "02468"),
        ({"budget": 0.3}, "0124578"),
        ({"budget": 0.05}, "0123456789"),
        ({"budget": 0}, "0123456789"),
        ({"budget": 1}, ""),
    ],
)
def test_a_mode_chooses_blocks_that_are_spread_evenly(value: Any, expected: str) -> None:
    mode = CheckpointingOptions(value).mode
    assert "".join(str(index) for index in range(10) if mode and mode.chooses(index)) == expected


@pytest.mark.parametrize(
    "value", ["some", 2, {"every": 0}, {"every": 1.5}, {"budget": 1.1}, {"every": 2, "budget": 0.5}, {"size": 1}, {}]
)
def test_other_modes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be one of 'none', 'full', 'selective', 'offload', True"):
        CheckpointingOptions(value)


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


def test_attention_is_computed_once() -> None:
    calls: list[str] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    def num_kernels(contexts: Any) -> int:
        calls.clear()
        x = torch.randn(2, 4, 8, 16, requires_grad=True)
        with Record():
            attend = lambda x: nn.functional.scaled_dot_product_attention(x, x, x).sin()  # noqa: E731
            checkpoint(attend, x, use_reentrant=False, **contexts).sum().backward()
        return calls.count("aten._scaled_dot_product_flash_attention_for_cpu.default")

    assert num_kernels({}) == 2
    assert num_kernels({"context_fn": selective_contexts}) == 1


def test_attention_with_dropout_runs_again_and_draws_the_same_numbers() -> None:
    """On the CPU, attention with dropout is no kernel of its own; a custom operation stands for one."""

    @torch.library.custom_op("tests::dropping_scaled_dot_product", mutates_args=())
    def attention(x: Tensor, dropout_p: float) -> Tensor:
        return x * (torch.rand_like(x) >= dropout_p) if dropout_p else x.clone()

    attention.register_autograd(lambda context, grad: (grad, None))
    operation = torch.ops.tests.dropping_scaled_dot_product.default

    def gradient(contexts: Any, dropout_p: float) -> Tensor:
        torch.manual_seed(0)
        x = torch.ones(64, requires_grad=True)
        run = lambda x: nn.functional.dropout(operation(x, dropout_p), 0.5)  # noqa: E731
        (checkpoint(run, x, use_reentrant=False, **contexts) ** 2).sum().backward()
        assert x.grad is not None
        return x.grad

    for dropout_p in (0.0, 0.5):
        assert torch.equal(gradient({"context_fn": selective_contexts}, dropout_p), gradient({}, dropout_p))


def test_activations_of_the_rerun_are_freed_during_the_backward() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()) for _ in range(6)))
    alive: list[int] = []

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
            ref = weakref.ref(x)
            x.register_hook(lambda grad: alive.append(sum(ref() is not None for ref in refs)))
            refs.append(ref)
        return x

    most = {}
    for name, contexts in (("full", {}), ("selective", {"context_fn": selective_contexts})):
        refs: list[Any] = []
        alive.clear()
        checkpoint(run, torch.randn(4, 8), use_reentrant=False, **contexts).sum().backward()
        most[name] = alive[-1]
    assert most["selective"] <= most["full"] + 1


def test_a_rerun_with_other_operations_is_refused() -> None:
    layers, numbers = Layers(), iter([3, 2])
    output = checkpoint(
        lambda x: layers(x, next(numbers)), torch.randn(4, 8), use_reentrant=False, context_fn=selective_contexts
    )
    with pytest.raises(RuntimeError, match="it computed with other operations than in its forward"):
        output.sum().backward()


def offloaded(function: Any, x: Tensor) -> None:
    """Run a backward through a block that computes ``function`` and offloads its activations."""
    block = nn.Module()
    block.forward = function
    offload.offload(block)
    block(x).sum().backward()


def test_large_activations_are_copied_and_parameters_are_not() -> None:
    layer = nn.Linear(64, 64)
    pack = offload._packer(layer, Copies().begin_call())
    moved = pack(torch.ones(64, 64).t())
    assert isinstance(moved, MovedTensor)
    assert moved.get().stride() == (1, 64)
    for tensor in (layer.weight, layer.weight.detach().t(), torch.ones(3), torch.eye(64).to_sparse()):
        assert isinstance(pack(tensor), offload._Unmoved)


def test_offloaded_activations_have_the_same_gradients_and_changes_of_small_ones_are_refused() -> None:
    for numel in (3, 3000):
        x = torch.ones(numel, requires_grad=True)
        offloaded(torch.exp, x)
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones(numel).exp())
    with pytest.raises(RuntimeError, match="was changed in place after it was computed with"):
        offloaded(lambda x: x.exp().mul_(2), torch.ones(3, requires_grad=True))
    sparse = torch.eye(3).to_sparse()
    offloaded(lambda x: torch.sparse.mm(sparse, x), torch.ones(3, 3, requires_grad=True))
