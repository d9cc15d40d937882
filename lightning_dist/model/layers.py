"""Describe along which dimensions of their weights linear layers and convolutions have their features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from lightning_dist._compat import own_parameters

__all__ = ["CONVOLUTIONS", "LinearLayer", "convolution", "linear_layer"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class LinearLayer:
    """Describe along which dimensions of its weight a linear layer or a convolution has its features.

    Args:
        in_dim: Dimension of the weight for the input features.
        out_dim: Dimension of the weight for the output features.
        in_features: Number of input features.
        out_features: Number of output features.
        out_size: Name of the attribute from which the layer's forward reads the number of output features; None: its
            forward does not read the number.
        feature_dim: Dimension of the inputs and outputs for the features, counted from the last one, which is -1.
    """

    in_dim: int
    out_dim: int
    in_features: int
    out_features: int
    out_size: str | None = None
    feature_dim: int = -1


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


def convolution(module: nn.Module) -> LinearLayer | None:
    """Return the description of a convolution, whose features are its channels.

    Args:
        module: A module of any kind.

    Returns:
        The description. None if the module is no convolution, if its weight is computed and not stored, or if it works
        on groups of channels, so that an output channel does not depend on all input channels.
    """
    if not isinstance(module, CONVOLUTIONS) or module.groups != 1 or own_parameters(module).get("weight") is None:
        return None
    in_dim, out_dim = (0, 1) if module.transposed else (1, 0)
    return LinearLayer(
        in_dim, out_dim, module.in_channels, module.out_channels, feature_dim=-1 - len(module.kernel_size)
    )
