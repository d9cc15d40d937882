"""Name torch's functions that draw random numbers.

Ranks whose generators have the same state draw the numbers of one process only if each of them draws all numbers, in
the same order, also those for elements that only other ranks have. Code that runs hooks on parts of tensors therefore
has to know these functions. So does code that replaces all draws by constants, to compare runs on different shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = [
    "CHANGES_AT_RANDOM",
    "CONSTANT_FOR",
    "DROPOUTS",
    "FILLS_AT_RANDOM",
    "IS_LIKE",
    "OF_NO_TENSOR",
    "RETURNS_RANDOM",
    "without_values",
]

CONSTANT_FOR: Mapping[str, float] = {
    **dict.fromkeys(
        (
            "cauchy_", "kaiming_normal_", "kaiming_uniform_", "log_normal_", "normal", "normal_", "orthogonal_",
            "poisson", "rand", "rand_like", "randn", "randn_like", "sparse_", "trunc_normal_", "uniform_",
            "xavier_normal_", "xavier_uniform_",
        ),
        0.5,
    ),
    **dict.fromkeys(("bernoulli", "bernoulli_", "binomial", "exponential_", "geometric_"), 1.0),
    **dict.fromkeys(("multinomial", "randint", "randint_like", "random_"), 0.0),
}  # fmt: skip
"""Functions that draw from a distribution, also those of ``torch.nn.init``, each with a number that can stand for all
that it draws."""

DROPOUTS = frozenset(
    {
        "alpha_dropout", "alpha_dropout_", "dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_",
        "feature_alpha_dropout", "feature_alpha_dropout_", "feature_dropout", "feature_dropout_",
    }
)  # fmt: skip
"""Functions that return or change a tensor, of which they drop elements at random."""

OF_NO_TENSOR = frozenset({"rand", "randint", "randn", "randperm"})
"""Functions that return random numbers and are given no tensor."""

_OTHERS = frozenset({"gumbel_softmax", "native_dropout", "rrelu", "rrelu_"})

_ALL = CONSTANT_FOR.keys() | DROPOUTS | _OTHERS

FILLS_AT_RANDOM = frozenset(name for name in CONSTANT_FOR if name.endswith("_"))
"""Methods, and functions of ``torch.nn.init``, that fill a tensor with random numbers and do not read it."""

CHANGES_AT_RANDOM = frozenset(name for name in _ALL if name.endswith("_")) - FILLS_AT_RANDOM
"""Functions that change a tensor in place at random."""

IS_LIKE = frozenset(name for name in CONSTANT_FOR if name.endswith("_like"))
"""Functions that return random numbers in the shape of a tensor, and do not read it."""

RETURNS_RANDOM = frozenset(name for name in _ALL if not name.endswith("_")) - OF_NO_TENSOR
"""Functions of tensors whose results are random."""


def without_values(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a plain tensor on ``device`` with the shape, strides and dtype of ``tensor``.

    torch draws other numbers for a tensor with other strides.
    """
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
