"""List options besides the sizes of a mesh that may help a layout."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.planning.planned import Planned
from lightning_dist.plugins.strategies import NDParallelStrategy

__all__ = ["RECOMPUTING", "names_of_set", "variants"]

RECOMPUTING = {"activation_checkpointing": "full"}
"""The option that every layout that needs too much is tried with."""

_TOKENS_OF_TILE = 512


def names_of_set(arguments: Mapping[str, Any]) -> set[str]:
    """Return the names of those arguments of a strategy whose values are not the defaults."""
    defaults = inspect.signature(NDParallelStrategy).parameters
    return {name for name, value in arguments.items() if name not in defaults or value != defaults[name].default}


def variants(planned: Planned, fits: bool, given: Collection[str]) -> list[Layout]:
    """Return layouts of the same sizes with further options.

    Args:
        planned: The prediction for the layout.
        fits: Whether it has enough memory: then the options may make it faster, and else they lower its memory.
        given: Names of arguments that are set, and not chosen.
    """
    options = _faster(planned) if fits else _smaller(planned)
    return [
        planned.layout.having(**chosen) for chosen in options if not (chosen.keys() | _excluded(chosen)) & set(given)
    ]


def _faster(planned: Planned) -> Iterator[dict[str, Any]]:
    layout = planned.layout
    if layout.dp_shard > 1 or layout.cp > 1:
        yield {"reshard_after_forward": False}
    if layout.pp > 1:
        yield {"schedule": "interleaved_1f1b"}
        yield from _microbatches(planned, 2)
        yield from _microbatches(planned, 0.5)
    if layout.recomputes:
        yield {"activation_checkpointing": "selective"}


def _smaller(planned: Planned) -> Iterator[dict[str, Any]]:
    if planned.layout.tp == 1:
        yield {"tiled_loss": _TOKENS_OF_TILE}
        yield {"tiled_loss": _TOKENS_OF_TILE, "tiled_mlp": _TOKENS_OF_TILE}
    yield from _microbatches(planned, 2)


def _microbatches(planned: Planned, factor: float) -> Iterator[dict[str, Any]]:
    """Yield the option of another number of microbatches, if a pipeline has as many for each stage and one sample."""
    number = 0 if planned.is_estimated else int(planned.num_microbatches * factor)
    if planned.layout.pp > 1 and planned.layout.pp <= number <= planned.batch.samples // planned.num_batches:
        yield {"num_microbatches": number}


def _excluded(chosen: Collection[str]) -> set[str]:
    """Return the arguments that some options cannot be given beside."""
    return {"zero_stage"} if "reshard_after_forward" in chosen else set()
