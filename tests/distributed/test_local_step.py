"""Test that optimizer steps on plain local shards equal the same steps on DTensors bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_dist.parameters.shard_step import ELEMENTWISE, LocalStep
from tests.pool import WorkerPool

SHAPES = [(5, 3), (1,), (7,), (2, 3, 4), ()]  # On two ranks, this gives uneven shards, an empty one, and a scalar.


def make_params() -> list[nn.Parameter]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(
            distribute_tensor(
                torch.randn(shape, generator=generator), mesh, [Shard(0) if shape else Replicate()], src_data_rank=None
            )
        )
        for shape in SHAPES
    ]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for index, param in enumerate(params):
        whole = torch.randn(param.shape, generator=generator)
        skips = index == 2 and step == 1  # This stands for a parameter that the step did not use.
        param.grad = (
            None if skips else distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        )


def train(cls: type[Optimizer], kwargs: dict[str, Any], is_local: bool, with_closure: bool) -> dict[str, torch.Tensor]:
    params = make_params()
    optimizer = cls([{"params": params[:2]}, {"params": params[2:], "lr": 0.05}], lr=0.1, **kwargs)
    seen: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(all(isinstance(p, DTensor) for p in everything())))
    if is_local:
        LocalStep(optimizer)

    def everything() -> list[torch.Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    for step in range(4):
        if with_closure:

            def closure(step: int = step) -> torch.Tensor:
                seen.append(all(isinstance(p, DTensor) for p in everything()))
                set_gradients(params, step)
                return torch.tensor(1.0)

            assert optimizer.step(closure) == 1.0
        else:
            set_gradients(params, step)
            optimizer.step()
    assert seen
    assert all(seen)
    assert all(a is b for a, b in zip(everything(), params, strict=True))
    tensors = {f"{index}": param.detach() for index, param in enumerate(params)} | {
        f"{index} {key} {type(value).__name__}": torch.as_tensor(value)
        for index, param in enumerate(params)
        for key, value in optimizer.state[param].items()
        if value is not None
    }
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in tensors.items()}


def both(cls: type[Optimizer], kwargs: dict[str, Any], with_closure: bool) -> list[dict[str, torch.Tensor]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    on_shards = train(cls, kwargs, True, with_closure)
    if cls is torch.optim.Rprop:  # Rprop cannot step on DTensors, so the reference steps on whole tensors.
        return [train_whole(cls, kwargs), {key: value for key, value in on_shards.items() if key.isdigit()}]
    return [train(cls, kwargs, False, with_closure), on_shards]


def train_whole(cls: type[Optimizer], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    sharded = make_params()
    params = [nn.Parameter(param.full_tensor().detach().clone()) for param in sharded]
    optimizer = cls([{"params": params[:2]}, {"params": params[2:], "lr": 0.05}], lr=0.1, **kwargs)
    for step in range(4):
        set_gradients(sharded, step)
        for param, source in zip(params, sharded, strict=True):
            param.grad = source.grad.full_tensor() if source.grad is not None else None
        optimizer.step()
    return {f"{index}": param.detach() for index, param in enumerate(params)}


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "AdamW": [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "NAdam": [{"decoupled_weight_decay": True}],
}
CASES = [
    pytest.param(cls, kwargs, id="-".join([cls.__name__, *kwargs]))
    for cls in sorted(ELEMENTWISE, key=lambda cls: cls.__name__)
    for kwargs in OPTIONS.get(cls.__name__, [{}])
]


@pytest.mark.parametrize("with_closure", [False, True], ids=["step", "closure"])
@pytest.mark.parametrize(("cls", "kwargs"), CASES)
def test_a_step_on_local_shards_equals_the_step_on_dtensors(
    cls: type[Optimizer], kwargs: dict[str, Any], with_closure: bool, pool: WorkerPool
) -> None:
    for reference, on_shards in pool.run(both, 2, cls, kwargs, with_closure):
        torch.testing.assert_close(on_shards, reference, rtol=0, atol=0)


def fail_in_the_update() -> list[bool]:
    dist.init_process_group("gloo")
    params = make_params()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    local_step = LocalStep(optimizer)
    set_gradients(params, 0)
    optimizer.step()
    optimizer.state[params[3]]["exp_avg"] = "no tensor"
    with pytest.raises(AttributeError, match="lerp_"):
        optimizer.step()
    local_step.restore()
    return [
        all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"]),
        all(isinstance(optimizer.state[param]["exp_avg_sq"], DTensor) for param in params),
        len(optimizer.state) == len(params),
    ]


def test_after_a_failed_step_parameters_and_state_are_dtensors_again(pool: WorkerPool) -> None:
    for rank in pool.run(fail_in_the_update, 2):
        assert rank == [True, True, True]


def remove_twice() -> bool:
    dist.init_process_group("gloo")
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1)
    LocalStep(optimizer).remove()
    seen: list[bool] = []
    LocalStep(optimizer)
    set_gradients(params, 0)
    optimizer.step(lambda: seen.append(True))
    return seen == [True] and all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])


def test_an_optimizer_can_be_used_in_two_fits(pool: WorkerPool) -> None:
    assert pool.run(remove_twice, 2) == [True, True]


class OtherSGD(torch.optim.SGD):
    """Stand for a user's optimizer, whose step may not work on local shards."""


def num_hooks() -> dict[str, int]:
    """Return how many hooks LocalStep puts on optimizers of DTensors, and on one of plain parameters."""
    dist.init_process_group("gloo")
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizers = {
        cls.__name__: cls(make_params(), lr=0.1) for cls in (torch.optim.SGD, OtherSGD, torch.optim.Adafactor)
    }
    for optimizer in (plain, *optimizers.values()):
        LocalStep(optimizer)
    return {name: len(o._optimizer_step_pre_hooks) for name, o in {"plain": plain, **optimizers}.items()}


def test_only_elementwise_optimizers_of_dtensors_step_on_local_shards(pool: WorkerPool) -> None:
    for rank in pool.run(num_hooks, 2):
        assert rank == {"plain": 0, "SGD": 1, "OtherSGD": 0, "Adafactor": 0}
