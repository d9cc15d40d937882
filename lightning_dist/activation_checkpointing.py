"""Checkpoint activations: compute those of a block again in the backward (Chen et al., 2016).

A block keeps its class, its names and its hooks. Only ``forward`` is replaced, on the instance, so that the block's
hooks do not run again in the backward. The rerun has the buffers and random numbers that the forward had.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_dist._compat import NORM
from lightning_dist.own_generators import get_state, own_generators, set_state
from lightning_dist.technique import Parallel, Rows, Technique, bound
from lightning_dist.units import Unit

__all__ = ["ActivationCheckpointing"]


class ActivationCheckpointing(Technique):
    """Keep no activations inside of blocks for the backward, but run the blocks again."""

    def attach(self, parallel: Parallel) -> None:
        """Collect the contexts that other techniques need around a block that runs again."""
        self._around_rerun = bound(parallel.techniques, "around_rerun")

    def prepare_unit(self, unit: Unit) -> None:
        """Replace the forwards of the unit's modules if it is a block."""
        for block in unit.modules if unit.kind == "block" else ():
            around = [around_rerun(unit, block) for around_rerun in self._around_rerun]
            _recompute(block, [*around, _BlockState(block).begin])

    def table_rows(self) -> Rows:
        """Return a row that says what is computed again."""
        yield "recomputed", "activations of blocks, in the backward"


class _BlockState:
    """Let ``block`` run again with the buffers and random numbers of its forward, without changing them a second time.

    torch restores the states of its own generators; this class restores those of Python, of NumPy, and of generators
    that are attributes of the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._changing: dict[bool, set[tuple[nn.Module, str]]] = {}
        """The buffers that the first forward changed, by ``block.training``; those of norms are always saved."""

    def begin(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that returns contexts: the first one for the forward, the others for its reruns."""
        kept: list[tuple[dict[tuple[nn.Module, str], Tensor], dict[str, Any]]] = []

        @contextmanager
        def context() -> Iterator[None]:
            if not kept:
                buffers = {place: buffer.detach().clone() for place, buffer in self._buffers().items()}
                kept.append((buffers, self._drawn()))
                yield
                self._forget_unchanged(buffers)
                return
            (buffers, drawn), now, drawn_now = kept[0], self._buffers(), self._drawn()
            # Buffers are replaced rather than changed in place, since autograd may have saved them for the backward.
            _put({place: buffer.clone() for place, buffer in buffers.items()})
            self._draw_from(drawn)
            try:
                yield
            finally:
                _put({place: buffer for place, buffer in now.items() if place in buffers})
                self._draw_from(drawn_now)

        return context

    def _buffers(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Return the buffers that a forward may change; before the first forward, all buffers."""
        known = self._changing.get(self._block.training)
        return {
            (module, key): buffer
            for module in self._block.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and (known is None or (module, key) in known or isinstance(module, NORM))
        }

    def _forget_unchanged(self, before: dict[tuple[nn.Module, str], Tensor]) -> None:
        """Drop the copies of buffers that the first forward has not changed."""
        if self._block.training in self._changing:
            return
        for place, copy in list(before.items()):
            if _is_equal(place[0]._buffers.get(place[1]), copy):
                del before[place]
        self._changing[self._block.training] = set(before)

    def _drawn(self) -> dict[str, Any]:
        own = {name: get_state(generator) for name, generator in own_generators(self._block)}
        return {**own, "": (random.getstate(), np.random.get_state())}

    def _draw_from(self, states: dict[str, Any]) -> None:
        python, numpy_state = states[""]
        random.setstate(python)
        np.random.set_state(numpy_state)
        for name, generator in own_generators(self._block):
            if name in states:
                set_state(generator, states[name])


def _is_equal(buffer: Tensor | None, kept: Tensor) -> bool:
    return buffer is not None and buffer.shape == kept.shape and torch.equal(buffer, kept)


def _put(buffers: Mapping[tuple[nn.Module, str], Tensor]) -> None:
    for (module, key), buffer in buffers.items():
        module._buffers[key] = buffer


def _recompute(block: nn.Module, around: Sequence[Callable[[], Callable[[], AbstractContextManager[None]]]]) -> None:
    """Replace the forward of ``block`` by one that runs again in the backward.

    Args:
        block: A module of a unit of the kind ``block``, whose ``forward`` is replaced on the instance.
        around: Functions that are called when a forward begins. Each returns a function whose context is entered around
            that forward, and around each time that it runs again.
    """
    forward = block.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        contexts = [begin() for begin in around]

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                return forward(*args, **kwargs)

        # The rerun must not stop early, because hooks that run after a forward undo what those before it have done.
        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed
