"""List options besides the sizes of a mesh that may help a layout."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.strategies import NDParallelStrategy

__all__ = ["RECOMPUTING", "names_of_set", "variants"]

RECOMPUTING = {"activation_checkpointing": "full"}
"""The option that every layout that needs too much is tried with."""

_TOKENS_OF_TILE = 512


def names_of_set(arguments: Mapping[str, Any]) -> set[str]:
    """Return the names of those arguments of a strategy whose values are not the defaults."""
    defaults = inspect.signature(NDParallelStrategy).parameters
    return {name for name, value in arguments.items() if name not in defaults or value != defaults[name].default}


def variants(layout: Layout, fits: bool, given: Collection[str]) -> list[Layout]:
    """Return layouts of the same sizes with further options.

    Args:
        layout: The layout.
        fits: Whether it has enough memory: then the options may make it faster, and else they lower its memory.
        given: Names of arguments that are set, and not chosen.
    """
    options = _faster(layout) if fits else _smaller(layout)
    return [layout.having(**chosen) for chosen in options if not (chosen.keys() | _excluded(chosen)) & set(given)]


def _faster(layout: Layout) -> Iterator[dict[str, Any]]:
    if layout.dp_shard > 1 or layout.cp > 1:
        yield {"reshard_after_forward": False}
    if layout.pp > 1:
        yield {"schedule": "interleaved_1f1b"}
    if layout.recomputes:
        yield {"activation_checkpointing": "selective"}


def _smaller(layout: Layout) -> Iterator[dict[str, Any]]:
    if layout.tp == 1:
        yield {"tiled_loss": _TOKENS_OF_TILE}
        yield {"tiled_loss": _TOKENS_OF_TILE, "tiled_mlp": _TOKENS_OF_TILE}


def _excluded(chosen: Collection[str]) -> set[str]:
    """Return the arguments that some options cannot be given beside."""
    return {"zero_stage"} if "reshard_after_forward" in chosen else set()
