"""Test that the names of random functions cover torch's random operations on tensors."""

from __future__ import annotations

import torch

from lightning_dist.random_functions import CHANGES_AT_RANDOM, FILLS_AT_RANDOM, RETURNS_RANDOM, without_values

_OF_NO_TENSOR = {"rand", "randint", "randn", "randperm"}
"""Operations that are not given a tensor."""

_OTHERS = {
    "fractional_max_pool2d", "fractional_max_pool3d", "rrelu_with_noise", "rrelu_with_noise_",
    "rrelu_with_noise_functional",
}  # fmt: skip
"""Layers of networks, which run in steps, and the operations behind functions whose own names are known."""


def test_all_random_operations_are_known() -> None:
    known = FILLS_AT_RANDOM | CHANGES_AT_RANDOM | RETURNS_RANDOM | _OF_NO_TENSOR | _OTHERS
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
