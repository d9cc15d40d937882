"""Find out from which random number generators a step draws, while it runs on fake tensors."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dist._compat import DispatchMode, named_arguments
from lightning_dist.model.own_generators import get_state, own_generators
from lightning_dist.tracing.step_graph.errors import TraceError

__all__ = ["Draws", "draws_numbers"]


class Draws(DispatchMode):  # type: ignore[no-untyped-call]
    """Observe which random number generators are used: torch's, Python's and NumPy's.

    Use of torch's generator is recognized by the operations, because operations on fake tensors do not change the
    generator's state.

    Args:
        is_between: Function that returns whether code between parts is running.
    """

    def __init__(self, is_between: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_between = is_between
        self._by_torch = False
        self._states: dict[str, object] = {}
        self._own: list[tuple[str, Any, object]] = []

    def watch(self, root: nn.Module) -> None:
        """Begin to watch the generators of Python and NumPy that are attributes of ``root`` or of a module in it."""
        self._own = [(name, generator, _packed(generator)) for name, generator in own_generators(root)]

    def _check_own(self) -> None:
        """Check that no watched generator was used by code between parts since the last call.

        Raises:
            TraceError: If one was used.
        """
        for name, generator, state in self._own:
            if self.is_between() and _packed(generator) != state:
                raise TraceError(
                    f"The step draws numbers from self.{name}, a generator of its own, between the model's parts. That"
                    " code runs on every stage, and for each microbatch, so that the generators of the stages would"
                    " soon differ: use torch's default generator, or the functions of the modules random or"
                    " numpy.random, which are seeded for each microbatch, equally on all stages."
                )
        self._own = [(name, generator, _packed(generator)) for name, generator, _ in self._own]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is not None and generator is not torch.default_generator and self.is_between():
            raise TraceError(
                "The step draws numbers from a torch.Generator of its own between the model's parts. That code runs on"
                " every stage, and the generators of the stages would soon differ: leave `generator` out. torch's"
                " default generator is seeded for each microbatch, equally on all stages."
            )
        self._by_torch |= draws_numbers(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def were_drawn(self) -> frozenset[str]:
        """Return the kinds of generators from which random numbers were drawn since the last call."""
        states: dict[str, object] = {"python": random.getstate(), "numpy": pickle.dumps(np.random.get_state())}
        drawn = {kind for kind, state in states.items() if state != self._states.get(kind)}
        if self._by_torch:
            drawn.add("torch")
        self._by_torch, self._states = False, states
        self._check_own()
        return frozenset(drawn)


def _packed(generator: Any) -> bytes:
    """Return the state of a generator in a form that can be compared."""
    return pickle.dumps(get_state(generator))


def draws_numbers(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers; operations that are not torch's own are assumed to do so."""
    if operation.namespace not in ("aten", "prim", "prims"):
        return True
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    # Attention has the tag only because of its dropout.
    dropout = named_arguments(operation, args, kwargs).get("dropout_p")
    return dropout is None or dropout > 0
