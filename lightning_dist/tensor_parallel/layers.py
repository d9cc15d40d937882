"""The layers that can be split, and where their features are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

__all__ = ["LinearLayer", "linear_layer", "looks_at_tokens", "num_heads", "shared_heads", "why_not_split"]


@dataclass(frozen=True)
class LinearLayer:
    """Where the features of a linear layer are in its parameters.

    Args:
        in_dim: The weight's dimension of the input features.
        out_dim: That of the output features.
        in_features: Their number.
        out_features: Their number.
        out_size: The attribute that its forward reads the number of output features from, if it does.
    """

    in_dim: int
    out_dim: int
    in_features: int
    out_features: int
    out_size: str | None = None


def linear_layer(module: nn.Module) -> LinearLayer | None:
    """Describe ``module``, if it is a linear layer whose weight is stored, and not computed in its forward."""
    if module._parameters.get("weight") is None:
        return None
    if isinstance(module, nn.Linear):
        return LinearLayer(1, 0, module.in_features, module.out_features)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # Hugging Face's, of GPT-2
        in_features, out_features = cast(Tensor, module.weight).shape
        return LinearLayer(0, 1, in_features, out_features, "nf")
    return None


def why_not_split(embedding: nn.Embedding) -> str:
    """Return the argument of ``embedding`` that needs the whole table on each rank; empty if there is none."""
    wanted = {
        "max_norm": embedding.max_norm is not None,
        "scale_grad_by_freq=True": embedding.scale_grad_by_freq,
        "sparse=True": embedding.sparse,
    }
    return ", ".join(name for name, is_set in wanted.items() if is_set)


def looks_at_tokens(embedding: nn.Embedding) -> bool:
    """Return whether ``embedding`` has a forward of its own, to which a split table would give other tokens."""
    return type(embedding).forward is not nn.Embedding.forward


def shared_heads(root: nn.Module, name: str, num_ranks: int) -> int | None:
    """How many heads a layer of keys or values has, if they are so few that several ranks use the same."""
    parent_name, _, _ = name.rpartition(".")
    parent, layer = root.get_submodule(parent_name), linear_layer(root.get_submodule(name))
    heads = None if layer is None else num_heads(parent, layer.out_features)
    if layer is None or heads is None or heads >= num_ranks or num_ranks % heads:
        return None
    beside = [linear_layer(child) for child in parent.children()]
    return heads if any(other.out_features > layer.out_features for other in beside if other) else None


def num_heads(parent: nn.Module | None, features: int) -> int | None:
    """How many attention heads a layer's features are, where the module that it is in says of how many each is."""
    head_dim = getattr(parent, "head_dim", None)
    return features // head_dim if isinstance(head_dim, int) and features % head_dim == 0 else None
