"""Find out which embeddings and attention heads can be split."""

from __future__ import annotations

from torch import nn

from lightning_dist.model.layers import linear_layer

__all__ = ["num_heads", "overrides_forward", "shared_heads", "unsupported_options"]


def unsupported_options(embedding: nn.Embedding) -> str:
    """Return the options of ``embedding`` that need the whole table on each rank; empty if none of them is set."""
    wanted = {
        "max_norm": embedding.max_norm is not None,
        "scale_grad_by_freq=True": embedding.scale_grad_by_freq,
        "sparse=True": embedding.sparse,
    }
    return ", ".join(name for name, is_set in wanted.items() if is_set)


def overrides_forward(embedding: nn.Embedding) -> bool:
    """Return whether ``embedding`` overrides ``forward``, whose code may then use the token ids itself.

    Such an embedding cannot be split, because splitting the table changes the token ids that ``forward`` is given.
    """
    return type(embedding).forward is not nn.Embedding.forward


def shared_heads(root: nn.Module, name: str, num_ranks: int) -> int | None:
    """Return the number of heads of a key or value layer that has fewer heads than there are ranks.

    Several ranks then use the same head.

    Args:
        root: The model, in which the layer is looked up.
        name: Full name of the layer, which may be of any kind.
        num_ranks: Number of ranks that layers are split over.

    Returns:
        The number of heads. None if this is not such a layer: the module around it has no ``head_dim``, there are as
        many heads as ranks or more, the number of heads does not divide the number of ranks, or no layer beside it has
        more output features, as a query layer would.
    """
    parent_name, _, _ = name.rpartition(".")
    parent, layer = root.get_submodule(parent_name), linear_layer(root.get_submodule(name))
    heads = None if layer is None else num_heads(parent, layer.out_features)
    if layer is None or heads is None or heads >= num_ranks or num_ranks % heads:
        return None
    beside = [linear_layer(child) for child in parent.children()]
    return heads if any(other.out_features > layer.out_features for other in beside if other) else None


def num_heads(parent: nn.Module | None, features: int) -> int | None:
    """Return the number of heads that ``features`` consist of, or None if no ``head_dim`` of ``parent`` divides it.

    Args:
        parent: The module that directly contains the layer; None: there is none, so that the result is None.
        features: Number of input or output features of the layer.
    """
    head_dim = getattr(parent, "head_dim", None)
    return features // head_dim if isinstance(head_dim, int) and features % head_dim == 0 else None
