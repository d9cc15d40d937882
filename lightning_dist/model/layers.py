"""Describe along which dimensions of its weight a linear layer has its input and output features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from lightning_dist._compat import own_parameters

__all__ = ["LinearLayer", "linear_layer"]


@dataclass(frozen=True)
class LinearLayer:
    """Describe along which dimensions of its weight a linear layer has its features.

    Args:
        in_dim: Dimension of the weight for the input features.
        out_dim: Dimension of the weight for the output features.
        in_features: Number of input features.
        out_features: Number of output features.
        out_size: Name of the attribute from which the layer's forward reads the number of output features; None: its
            forward does not read the number.
    """

    in_dim: int
    out_dim: int
    in_features: int
    out_features: int
    out_size: str | None = None


def linear_layer(module: nn.Module) -> LinearLayer | None:
    """Return the description of ``module``; None if it is not a linear layer, or its weight is computed, not stored."""
    if own_parameters(module).get("weight") is None:
        return None
    if isinstance(module, nn.Linear):
        return LinearLayer(1, 0, module.in_features, module.out_features)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # This is Hugging Face's linear layer of GPT-2.
        in_features, out_features = cast(Tensor, module.weight).shape
        return LinearLayer(0, 1, in_features, out_features, "nf")
    return None
