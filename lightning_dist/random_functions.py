"""Name torch's functions that draw random numbers.

Ranks whose generators have the same state draw the numbers of one process only if each of them draws all numbers, in
the same order, also those for elements that only other ranks have. Code that runs hooks on parts of tensors therefore
has to know these functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHANGES_AT_RANDOM", "FILLS_AT_RANDOM", "IS_LIKE", "RETURNS_RANDOM", "without_values"]

FILLS_AT_RANDOM = frozenset(
    {
        "bernoulli_", "cauchy_", "exponential_", "geometric_", "kaiming_normal_", "kaiming_uniform_", "log_normal_",
        "normal_", "orthogonal_", "random_", "sparse_", "trunc_normal_", "uniform_", "xavier_normal_",
        "xavier_uniform_",
    }
)  # fmt: skip
"""Methods, and functions of ``torch.nn.init``, that fill a tensor with random numbers and do not read it."""

CHANGES_AT_RANDOM = frozenset({"alpha_dropout_", "dropout_", "feature_alpha_dropout_", "feature_dropout_", "rrelu_"})
"""Functions that change a tensor in place at random."""

IS_LIKE = frozenset({"rand_like", "randint_like", "randn_like"})
"""Functions that return random numbers in the shape of a tensor, and do not read it."""

RETURNS_RANDOM = IS_LIKE | {
    "alpha_dropout", "bernoulli", "binomial", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "feature_alpha_dropout", "feature_dropout", "gumbel_softmax", "multinomial", "native_dropout", "normal", "poisson",
    "rrelu",
}  # fmt: skip
"""Functions of tensors whose results are random."""


def without_values(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a plain tensor on ``device`` with the shape, strides and dtype of ``tensor``.

    torch draws other numbers for a tensor with other strides.
    """
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
