"""Test that a trial of an optimizer finds out what its updates depend on, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_dist.parameters.memory_use import state_bytes_per_element
from lightning_dist.parameters.whole_step import Scope, try_optimizer
from tests.whole_optimizers import BySomeRows, Orthogonal, Shampoo, Sharpness, ToNormOfAll


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make parameters that are sharded over two ranks, without the second rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    shapes = [(300, 200), (200, 300), (7, 5, 3), (40,), (1, 4)]
    whole = [torch.randn(shape) for shape in shapes]
    return [nn.Parameter(distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)) for one in whole]


class Elementwise(torch.optim.AdamW):
    """Stand for an optimizer whose class is not known."""


class ClipsUpdates(torch.optim.SGD):
    """Clip the update of each parameter by its norm, which takes effect only if a gradient grows suddenly."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                root = param.grad.square().mean().sqrt()
                param.grad.div_(torch.clamp(root / 500, min=1.0))
        super().step()
        return loss


class FactorsLargeOnes(BySomeRows):
    """Factorize only if both dimensions have at least 128 elements."""

    def direction(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        if param.ndim == 2 and min(param.shape) >= 128:
            return super().direction(param, state)
        return param.grad


class DividesByLoss(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for param in self.param_groups[0]["params"]:
            param.grad.mul_(loss)
        super().step()
        return loss


class Draws(torch.optim.SGD):
    """Add noise to gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for param in self.param_groups[0]["params"]:
            param.grad.add_(torch.randn_like(param.grad))
        super().step()
        return loss


def warming_up(params: Any) -> torch.optim.Optimizer:
    optimizer = Orthogonal(params)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    return optimizer


@pytest.mark.parametrize(
    ("make", "scope", "uses_loss"),
    [
        (torch.optim.SGD, Scope.ELEMENT, False),
        (Elementwise, Scope.ELEMENT, False),
        (torch.optim.Adafactor, Scope.PARAMETER, False),
        (lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]), Scope.PARAMETER, False),
        (BySomeRows, Scope.PARAMETER, False),
        (Shampoo, Scope.PARAMETER, False),
        (warming_up, Scope.PARAMETER, False),
        (lambda params: ClipsUpdates(params, lr=0.1), Scope.PARAMETER, False),
        (FactorsLargeOnes, Scope.PARAMETER, False),
        (ToNormOfAll, Scope.MODEL, False),
        (Draws, Scope.MODEL, False),
        (Sharpness, Scope.MODEL, True),
        (lambda params: torch.optim.LBFGS(params, max_iter=2), Scope.MODEL, True),
        (DividesByLoss, Scope.MODEL, True),
    ],
)
def test_the_scope_of_an_update_is_found(
    params: list[nn.Parameter], make: Callable[[Any], torch.optim.Optimizer], scope: Scope, uses_loss: bool
) -> None:
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    before = [param.to_local().clone() for param in params]
    random_state = torch.get_rng_state()
    optimizer = make(params)
    rate = optimizer.param_groups[0]["lr"]
    try:
        finding = try_optimizer(optimizer)
        state_bytes_per_element(optimizer, optimizer.param_groups[0], torch.float32)
    finally:
        for handle in handles:
            handle.remove()
    assert (finding.scope, finding.uses_loss) == (scope, uses_loss), finding.reason
    assert not calls
    assert not any(optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == rate
    assert torch.equal(torch.get_rng_state(), random_state)
    for param, values in zip(params, before, strict=True):
        assert torch.equal(param.to_local(), values)
        assert param.grad is None


def test_an_integer_parameter_may_come_first() -> None:
    number, weight = nn.Parameter(torch.arange(4), requires_grad=False), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([number, weight])
    assert state_bytes_per_element(optimizer, optimizer.param_groups[0], torch.float32) == 8
    assert try_optimizer(optimizer).scope is Scope.ELEMENT
