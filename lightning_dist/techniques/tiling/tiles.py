"""Run a function on a few tokens at a time, and again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist._compat import tree_leaves, tree_map
from lightning_dist.model.reruns import Begin

__all__ = ["inside_of", "on_tile", "ranges", "tiled"]

TOKENS = -2
"""The dimension of the tokens in the input and in the output of a module that is tiled."""


def on_tile(begin: Begin, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``; if gradients are needed, keep only ``args``, and call it again in the backward.

    Random numbers, autocast, what the module holds, and the results are the same in both calls.

    Args:
        begin: Function that lets the module with which ``function`` computes have the same state in both calls.
        function: Function of ``args``.
        args: Tensors, and other values.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    same_state = begin()

    def run(*args: Any) -> Any:
        with same_state():
            return function(*args)

    return checkpoint(run, *args, use_reentrant=False)


def inside_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside of ``module`` by their names in it."""
    return ((name, inner) for name, inner in module.named_modules() if name)


def ranges(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first token and the number of tokens of each tile of at most ``size`` of ``length`` tokens."""
    for start in range(0, length, size):
        yield start, min(size, length - start)


def tiled(
    module: nn.Module, size: int, begin: Begin, must_be_whole: Callable[[], bool] = lambda: False
) -> Callable[..., Tensor]:
    """Return a function that computes what the forward of ``module`` does, tile by tile.

    Args:
        module: A module that computes token by token, with one tensor among its arguments, of shape
            ``(..., tokens, features)``.
        size: Number of tokens of a tile.
        begin: Function that lets the module have the same state in the backward.
        must_be_whole: Function that returns whether a call must compute all tokens at once.
    """
    forward = module.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        (given,) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if given.size(TOKENS) <= size or must_be_whole():
            whole: Tensor = forward(*args, **kwargs)
            return whole

        def compute(tile: Tensor) -> Tensor:
            own = tile.contiguous()  # Modules may take views of their input.
            some_args, some_kwargs = tree_map(lambda leaf: own if leaf is given else leaf, (args, kwargs))
            part: Tensor = forward(*some_args, **some_kwargs)
            return part

        tiles = ranges(given.size(TOKENS), size)
        return torch.cat([on_tile(begin, compute, given.narrow(TOKENS, *tile)) for tile in tiles], TOKENS)

    return run
