"""Let a block run again with the buffers, the attributes and the random numbers of its forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dist._compat import NORM, own_buffers
from lightning_dist.model.own_generators import get_state, own_generators, set_state
from lightning_dist.techniques.activation_checkpointing.block_attributes import BlockAttributes, Changes

__all__ = ["BlockState"]


class BlockState:
    """Let ``block`` run again with the state that its forward began with, without changing the state a second time.

    The state consists of buffers, of attributes such as a counter of calls, and of random numbers. torch restores the
    states of its own generators; this class restores those of Python, of NumPy, and of generators that are attributes
    of the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._attributes = BlockAttributes(block)
        self._changing: dict[bool, set[tuple[nn.Module, str]]] = {}
        """The buffers that the first forward changed, by ``block.training``; those of norms are always saved."""

    def begin(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that returns contexts: the first one for the forward, the others for its reruns."""
        kept: list[tuple[dict[tuple[nn.Module, str], Tensor], dict[str, Any], Changes]] = []

        @contextmanager
        def context() -> Iterator[None]:
            if not kept:
                buffers = {place: buffer.detach().clone() for place, buffer in self._buffers().items()}
                drawn = self._drawn()
                with self._attributes.recorded() as changes:
                    yield
                self._forget_unchanged(buffers)
                kept.append((buffers, drawn, changes))
                return
            (buffers, drawn, changes), now, drawn_now = kept[0], self._buffers(), self._drawn()
            # Buffers are replaced rather than changed in place, since autograd may have saved them for the backward.
            _put({place: buffer.clone() for place, buffer in buffers.items()})
            self._draw_from(drawn)
            try:
                with changes.undone():
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
            for key, buffer in own_buffers(module).items()
            if buffer is not None and (known is None or (module, key) in known or isinstance(module, NORM))
        }

    def _forget_unchanged(self, before: dict[tuple[nn.Module, str], Tensor]) -> None:
        """Drop the copies of buffers that the first forward has not changed."""
        if self._block.training in self._changing:
            return
        for place, copy in list(before.items()):
            if _is_equal(own_buffers(place[0]).get(place[1]), copy):
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
        own_buffers(module)[key] = buffer
