"""Find the random number generators that are attributes of a module, and read and set their states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

__all__ = ["GENERATORS", "get_state", "own_generators", "set_state"]

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Classes of the generators of Python and NumPy."""


def own_generators(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and generator for each generator of Python or NumPy that is an attribute of ``root`` or a submodule.

    Args:
        root: Module that is searched with its submodules; generators in lists or other objects are not found.
    """
    for name, module in root.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, GENERATORS):
                yield f"{name}.{key}".strip("."), value


def get_state(generator: Any) -> Any:
    """Return the state of a generator of Python, NumPy or torch."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator to a state that :func:`get_state` has returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
