"""Test that what users' hooks change in a trial is undone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.tracing.users_hooks import unchanged_by_hooks

SEEN: list[Any] = []


class Probing(nn.Module):
    """Keep what hooks of a layer see, in every way that users do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.total = torch.zeros(())
        self.register_buffer("maximum", torch.zeros(()))
        self.kept: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {"sum": torch.zeros(())}
        self.count = 0
        shapes: list[Any] = []
        self.shapes = shapes
        self.layer.register_forward_hook(self.observe)
        self.layer.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
        self.layer.register_forward_hook(lambda module, args, out: SEEN.append(out.shape))
        self.layer.register_forward_pre_hook(partial(_count, self))
        self.layer.register_full_backward_hook(self.observe_gradient)

    def observe(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.maximum.copy_(out.max().detach())
        self.kept.append(out)
        self.by_name["sum"] += out.sum().detach()
        self.latest = out

    def observe_gradient(self, module: nn.Module, given: Any, returned: Any) -> None:
        self.total += returned[0].abs().sum()


def _count(probing: Probing, module: nn.Module, args: Any) -> None:
    probing.count += 1


def state(model: Probing) -> list[Any]:
    values = [
        model.total.item(),
        model.maximum.item(),
        model.by_name["sum"].item(),
        model.count,
        hasattr(model, "latest"),
    ]
    return [*values, len(model.kept), len(model.shapes), len(SEEN)]


def test_a_trial_leaves_nothing_behind_what_hooks_reach() -> None:
    model = Probing()
    model.layer(torch.ones(1, 2)).sum().backward()
    del model.latest
    before, weight = state(model), model.layer.weight.detach().clone()
    assert 0 not in (before[0], before[2], before[3], *before[5:])
    with unchanged_by_hooks(model.layer):
        model.layer(torch.full((3, 2), 7.0)).sum().backward()
        assert all(now != then for now, then in zip(state(model), before, strict=True))
    assert state(model) == before
    assert torch.equal(model.layer.weight, weight)


def test_a_block_without_hooks_is_left_as_it_is() -> None:
    block = nn.BatchNorm1d(2)
    with unchanged_by_hooks(block):
        block(torch.rand(4, 2))
    assert block.num_batches_tracked == 1
