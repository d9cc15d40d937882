"""Let a step draw the same random numbers on the ranks of a strategy and in one process, or none.

A rank that has whole layers draws numbers of the same shapes as one process that runs the rank's batch, so that one
process which starts from the rank's random state draws the same numbers. Ranks that split layers, or the batch into
microbatches, draw numbers of other shapes: dropout is switched off there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_dist.model.own_generators import get_state, own_generators, set_state
from lightning_dist.model.randomness import rng_state, set_rng_state
from lightning_dist.model.same_batch import digest

__all__ = ["have_advanced", "random_states", "set_random_states", "switch_off_dropout"]


def random_states(module: nn.Module) -> dict[str, Any]:
    """Return the states of the global generators, and of the generators that are attributes of ``module``."""
    return {"global": rng_state(), "own": {name: get_state(own) for name, own in own_generators(module)}}


def set_random_states(module: nn.Module, states: dict[str, Any]) -> None:
    """Set the states that :func:`random_states` has returned for a module of the same class."""
    set_rng_state(states["global"])
    for name, generator in own_generators(module):
        if name in states["own"]:
            set_state(generator, states["own"][name])


def have_advanced(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether random numbers were drawn between two results of :func:`random_states`."""
    return bool(digest(before) != digest(after))


def switch_off_dropout(module: nn.Module) -> list[str]:
    """Set every probability of dropout in ``module`` to 0, and return their names.

    A probability is a number between 0 and 1 that is an attribute of a submodule, and whose name contains "drop"; or
    is ``p`` in a module whose class has "Drop" or "Stochastic" in its name. These are the conventions of torch,
    torchvision, timm and transformers.
    """
    found = list(_probabilities(module))
    for owner, key, _ in found:
        setattr(owner, key, 0.0)
    return [name for _, _, name in found]


def _probabilities(root: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for path, owner in root.named_modules():
        of_dropout = any(word in type(owner).__name__ for word in ("Drop", "Stochastic"))
        for key, value in list(vars(owner).items()):
            if isinstance(value, float) and 0 < value <= 1 and ("drop" in key.lower() or (key == "p" and of_dropout)):
                yield owner, key, f"{path}.{key}".strip(".")
