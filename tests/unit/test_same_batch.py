"""A batch's hash on a device sees values, samples and their order; tried on the CPU, which has the same function."""

from __future__ import annotations

import torch

from lightning_dist.tensor_parallel.same_batch import hash_of_samples


def test_values_and_the_order_of_samples_count() -> None:
    tokens = torch.arange(12).view(3, 4)
    number = int(hash_of_samples(tokens))
    assert hash_of_samples(tokens).shape == ()
    assert int(hash_of_samples(tokens.clone())) == number
    assert int(hash_of_samples(tokens.flip(0))) != number
    assert int(hash_of_samples(tokens + 1)) != number
    images = torch.rand(2, 3, 4, 4)
    assert int(hash_of_samples(images)) != int(hash_of_samples(images.flip(0)))
    assert int(hash_of_samples(torch.tensor([1, 2]))) != int(hash_of_samples(torch.tensor([2, 1])))
    assert int(hash_of_samples(torch.tensor(3.0))) != int(hash_of_samples(torch.tensor(2.0)))
