"""A tensor that a step logs is recognized as a mean over samples, or as something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_dist.tracing.step_graph.means import follow, is_known_mean, is_mean, is_same_value


class Follow(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in ((args, kwargs), out)]
        follow(func.__name__, args, kwargs or {}, *tensors)
        return out


X, Y = torch.randn(8, 5), torch.randint(5, (8,))


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: functional.cross_entropy(X, Y), True),
        (lambda: 0.5 * functional.mse_loss(X, X + 1) + X.abs().mean() / 3 - 1, True),
        (lambda: (X.argmax(1) == Y).float().mean().detach(), True),
        (lambda: X.sum(1).mean(), True),
        (lambda: X.mean(0).sum(), True),
        (lambda: torch.stack([X.mean(), X.square().mean()]).sum(), True),
        (lambda: functional.cross_entropy(X, Y).exp(), False),
        (lambda: X.square().mean().sqrt(), False),
        (lambda: X.mean() * X.mean(), False),
        (lambda: 1 / X.mean(), False),
        (lambda: X.std(0).mean(), False),
        (lambda: X.sum(), False),
        (lambda: functional.cross_entropy(X, Y, reduction="sum"), False),
        (lambda: X[Y > 2].mean(), False),
        (lambda: (X.argmax(1) == Y).sum() / len(Y), True),
        (lambda: X.square().sum().div(X.numel()) * torch.ones(()), True),
        (lambda: X.sum() / 3, False),
        (lambda: (X[:, 0] * (Y > 2)).sum() / (Y > 2).sum(), False),
        (lambda: X.sum() / torch.tensor(float(X.numel())), False),
        (lambda: X.max(), False),
        (lambda: X[0, 0], False),
        (lambda: torch.zeros(()).add_(X.sum()), False),
    ],
)
def test_means_over_samples_are_recognized(compute: Callable[[], Tensor], expected: bool) -> None:
    with Follow():
        result = compute()
    assert result.ndim == 0
    assert is_mean(result) == expected


def test_copies_of_a_loss_are_the_same_value_until_they_change() -> None:
    with Follow():
        loss = X.sum()
        copy = loss.detach().clone().float()
        other = loss.detach() * 2
        assert is_same_value(copy, loss)
        assert not is_same_value(other, loss)
        copy += 1
        assert not is_same_value(copy, loss)


def test_a_mean_times_a_number_may_be_a_sum() -> None:
    with Follow():
        mean = functional.cross_entropy(X, Y).detach()
        scaled = mean * len(Y)
    assert is_known_mean(mean)
    assert not is_known_mean(scaled)
    assert not is_known_mean(torch.tensor(3.0))
