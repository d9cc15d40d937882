"""The hash of a batch that is computed on a device depends on the values and their order; the CPU computes the same."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dist.model.same_batch import digest, hash_of_elements


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16])
def test_the_hash_depends_on_the_values_and_their_order(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 7]]).to(dtype)
    number = int(hash_of_elements(tensor))
    assert hash_of_elements(tensor).shape == ()
    assert int(hash_of_elements(tensor.clone())) == number
    changed = tensor.clone()
    changed[1, 2] = 1
    for other in (tensor.flip(0), tensor.flip(1), tensor.t(), changed):
        assert int(hash_of_elements(other)) != number


def test_the_hash_of_a_tensor_without_dimensions_depends_on_its_value() -> None:
    assert int(hash_of_elements(torch.tensor(3.0))) != int(hash_of_elements(torch.tensor(2.0)))
    assert int(hash_of_elements(torch.tensor(1 + 2j))) != int(hash_of_elements(torch.tensor(2 + 1j)))


class Own:
    def __init__(self, x: torch.Tensor, made_at: float) -> None:
        self.x = x
        self.made_at = made_at


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        ({"text": ["a", "b"]}, {"text": ["a", "c"]}),
        ((torch.ones(2), 3), (torch.ones(2), 4)),
        ([np.arange(3)], [np.arange(3.0)]),
        ([np.array(["a", None], dtype=object)], [np.array(["b", None], dtype=object)]),
        (Own(torch.ones(2), 0.0), Own(torch.zeros(2), 0.0)),
    ],
)
def test_strings_numbers_arrays_and_objects_are_compared(batch: Any, other: Any) -> None:
    assert int(digest(batch)) == int(digest(copy.deepcopy(batch)))
    assert int(digest(batch)) != int(digest(other))


def test_numbers_in_objects_are_not_compared() -> None:
    assert int(digest(Own(torch.ones(2), 0.0))) == int(digest(Own(torch.ones(2), 1.0)))
