"""Values that are split over the tokens have the same losses and gradients as whole ones, in every use."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.techniques.context_parallel.split_tokens import SplitTokens
from lightning_dist.techniques.context_parallel.tokens import Tokens
from tests.pool import WorkerPool
from tests.unit.test_split_logits import GATHERED, SPLIT, given

ON_TOKENS = {*SPLIT, "smoothing", "weight"} - {"last"}
"""The uses for which no values are gathered."""


def compare(is_balanced: bool) -> dict[str, tuple[float, float, bool]]:
    """Return, for each use, the largest errors of loss and gradient, and whether the values were gathered.

    The 5 tokens do not divide by the 4 ranks.
    """
    dist.init_process_group("gloo")
    results = {}
    for name, use in {**SPLIT, **GATHERED}.items():
        logits, targets = given()
        logits.requires_grad_()
        expected = use(logits, targets)
        (wanted,) = torch.autograd.grad(expected, logits)
        tokens = Tokens(logits.size(1), dist.group.WORLD, is_balanced)
        part = logits.detach().clone().requires_grad_()
        was_gathered, whole = [False], SplitTokens.whole

        def noting(self: SplitTokens, function: str, was: list[bool] = was_gathered, whole: object = whole) -> Tensor:
            was[0] = True
            return whole(self, function)  # type: ignore[operator]

        SplitTokens.whole = noting  # type: ignore[method-assign]
        try:
            split = SplitTokens(tokens.split(part, -2), tokens, -2)
            assert split.shape == logits.shape and split.requires_grad
            actual = use(split, targets)
            (gradient,) = torch.autograd.grad(actual, part)
        finally:
            SplitTokens.whole = whole  # type: ignore[method-assign]
        errors = float((actual - expected).abs().detach()), float((gradient - wanted).abs().max())
        results[name] = (*errors, was_gathered[0])
    return results


@pytest.mark.parametrize("is_balanced", [False, True])
def test_every_use_of_split_tokens_gives_the_loss_and_gradient_of_whole_ones(
    pool: WorkerPool, is_balanced: bool
) -> None:
    for results in pool.run(compare, 4, is_balanced):
        for name, (loss, gradient, was_gathered) in results.items():
            assert loss < 1e-12 and gradient < 1e-12, name
            assert was_gathered == (name not in ON_TOKENS), name


def in_place() -> None:
    dist.init_process_group("gloo")
    values = SplitTokens(torch.zeros(2, 3, 4), Tokens(12, dist.group.WORLD, is_balanced=False), -2)
    with pytest.raises(RuntimeError, match="__setitem__ of a tensor that is split over cp would change a copy"):
        values[..., 2] = 0.0
    dist.barrier()  # A rank that left earlier would close its connections while others still make theirs.


def test_changing_split_values_in_place_is_refused(pool: WorkerPool) -> None:
    pool.run(in_place, 4)
