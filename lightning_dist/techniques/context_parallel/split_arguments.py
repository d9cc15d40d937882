"""Split the arguments of a block along the sequence, and describe those that may choose what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_dist._compat import tree_flatten, tree_unflatten
from lightning_dist.techniques.context_parallel.plan import SequenceSplitError, SplitBlock
from lightning_dist.techniques.context_parallel.tokens import Tokens

__all__ = ["describe_options", "dim_of_tokens", "is_cache", "split_arguments"]

_WITHOUT_EFFECT = ("use_cache", "output_hidden_states")
"""Hugging Face's flags that blocks are given but do not compute with: a cache is passed as another argument."""


def dim_of_tokens(tensor: Tensor, length: int) -> int | None:
    """Return the negative dimension along which ``tensor`` has one entry for each token; None: there is no such one.

    If several dimensions have that size, as in a mask of pairs of tokens, every rank needs the whole tensor.

    Args:
        tensor: An argument of a block.
        length: Number of tokens of the sequence.
    """
    found = [dim for dim, size in enumerate(tensor.shape) if size == length]
    return found[0] - tensor.ndim if len(found) == 1 else None


def is_cache(value: object) -> bool:
    """Return whether an argument of a block holds keys and values of earlier tokens."""
    return hasattr(value, "get_seq_length")


def describe_options(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, str]:
    """Describe the arguments of a call that may choose what a block computes: all but tensors, caches and None.

    A plain value is described by itself, and any other one by its class. Tensors may come and go: Hugging Face passes
    masks only where they are needed. Flags that change nothing in a block are left out.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    named = {f"positional argument {index}": value for index, value in enumerate(args)} | dict(kwargs)
    return {
        name: repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
        for name, value in sorted(named.items())
        if value is not None and not isinstance(value, Tensor) and not is_cache(value) and name not in _WITHOUT_EFFECT
    }


def split_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], split: SplitBlock, tokens: Tokens, hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block for this rank's tokens.

    Args:
        args: The positional arguments for the whole sequence.
        kwargs: The keyword arguments for the whole sequence.
        split: How they are split.
        tokens: The tokens that this rank has.
        hidden: The hidden states of these tokens, which take the place of those among the arguments.

    Raises:
        SequenceSplitError: If an argument has by chance as many tokens as this rank.
    """
    new_args = [
        hidden if key == split.hidden else _split_argument(key, value, split, tokens) for key, value in enumerate(args)
    ]
    new_kwargs = {
        key: hidden if key == split.hidden else _split_argument(key, value, split, tokens)
        for key, value in kwargs.items()
    }
    return tuple(new_args), new_kwargs


def _split_argument(key: int | str, value: Any, split: SplitBlock, tokens: Tokens) -> Any:
    """Return the argument ``key`` of a block for this rank's tokens, given the whole one."""
    leaves, structure = tree_flatten(value)
    index = 0
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        dim = split.dims[key, index] if (key, index) in split.dims else dim_of_tokens(leaf, tokens.length)
        if dim is not None and leaf.size(dim) == tokens.own:
            which = f"argument {key}" if isinstance(key, str) else f"positional argument {key}"
            raise SequenceSplitError(
                f"cp_size={tokens.group.size()}: the {which} of a block has {tokens.own} tokens in this step, as each"
                f" rank has of the sequence of {tokens.length}, and it was as long as the sequence in the first step."
                " Pad it, or the sequence, to another length."
            )
        if dim is not None and leaf.size(dim) == tokens.length:
            leaves[place] = tokens.split(leaf, dim) if leaf.requires_grad else tokens.part(leaf, dim)
        elif leaf.requires_grad:
            leaves[place] = tokens.copy_to(leaf)
        index += 1
    return tree_unflatten(leaves, structure) if index else value
