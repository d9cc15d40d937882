"""Test that the names of random functions cover torch's random operations on tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_dist.model.fixed_draws import fixed_draws
from lightning_dist.model.random_functions import (
    CHANGES_AT_RANDOM,
    CONSTANT_FOR,
    DROPOUTS,
    FILLS_AT_RANDOM,
    OF_NO_TENSOR,
    RETURNS_RANDOM,
    without_values,
)

_OTHERS = {
    "fractional_max_pool2d", "fractional_max_pool3d", "rrelu_with_noise", "rrelu_with_noise_",
    "rrelu_with_noise_functional",
}  # fmt: skip
"""Layers of networks, which run in steps, and the operations behind functions whose own names are known."""


def test_all_random_operations_are_known() -> None:
    known = FILLS_AT_RANDOM | CHANGES_AT_RANDOM | RETURNS_RANDOM | OF_NO_TENSOR | _OTHERS
    found = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = (
            [getattr(packet, overload) for overload in packet.overloads()] if hasattr(packet, "overloads") else []
        )
        if any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads):
            found.add(name)
    assert {"normal_", "bernoulli", "randn_like"} <= found
    unknown = {name for name in found - known if not name.startswith("_") and hasattr(torch.Tensor, name)}
    assert not unknown


def test_a_tensor_without_values_has_the_same_strides() -> None:
    made = without_values(torch.empty(4, 6, device="meta").t()[2:5], torch.device("cpu"))
    assert (made.shape, made.stride(), made.device.type) == ((3, 4), (1, 6), "cpu")


_NOT_ON_A_VECTOR = {"normal": (torch.zeros(6), 1.0), "multinomial": (torch.ones(6), 6), "rand": (6,), "randn": (6,)}
"""Arguments of functions of which a tensor of 6 ones is not the only one."""


@pytest.mark.parametrize("name", sorted(CONSTANT_FOR.keys() | DROPOUTS))
def test_fixed_draws_do_not_depend_on_the_generator(name: str) -> None:
    owners = (torch, torch.Tensor, functional, nn.init)
    functions = [getattr(owner, name) for owner in owners if callable(getattr(owner, name, None))]
    assert functions
    for function in functions:
        of_module = getattr(function, "__module__", "") in ("torch.nn.functional", "torch.nn.init")
        with fixed_draws():
            found = []
            for _ in range(2):
                x = torch.ones(6, 4) if of_module else torch.ones(6)
                more = {"sparse_": (0.5,), "geometric_": (0.5,), "randint_like": (9,), "binomial": (x / 2,)}
                drops = () if of_module or name not in DROPOUTS else (0.5, True)
                args = {"randint": (9, (6,))}.get(name, _NOT_ON_A_VECTOR.get(name, (x, *more.get(name, ()), *drops)))
                found.append(function(*args))
        assert torch.equal(*found)
