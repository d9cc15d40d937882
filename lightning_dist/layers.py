"""Describe layers: where the features of linear ones lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

__all__ = ["LinearLayer", "linear_layer"]


@dataclass(frozen=True)
class LinearLayer:
    """Represent along which dimensions of its weight the features of a linear layer lie.

    Args:
        in_dim: Dimension of the weight that the input features lie along.
        out_dim: Dimension of the weight that the output features lie along.
        in_features: Number of input features.
        out_features: Number of output features.
        out_size: Name of the attribute from which the layer's forward reads the number of output features; None: it
            reads none.
    """

    in_dim: int
    out_dim: int
    in_features: int
    out_features: int
    out_size: str | None = None


def linear_layer(module: nn.Module) -> LinearLayer | None:
    """Describe ``module``; None if it is no linear layer, or its weight is computed rather than stored."""
    if module._parameters.get("weight") is None:
        return None
    if isinstance(module, nn.Linear):
        return LinearLayer(1, 0, module.in_features, module.out_features)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # Hugging Face's linear layer of GPT-2
        in_features, out_features = cast(Tensor, module.weight).shape
        return LinearLayer(0, 1, in_features, out_features, "nf")
    return None
