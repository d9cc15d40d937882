"""Let a block run again with the values of buffers, the content of containers and the random numbers of its forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dist._compat import NORM, own_buffers, version_of
from lightning_dist.model.own_generators import get_state, own_generators, set_state
from lightning_dist.techniques.activation_checkpointing.block_containers import BlockContainers, Changes, undone

__all__ = ["BlockState"]

_FEW = 2**14
"""Number of elements up to which buffers are copied before each forward, because a step may change them in place."""

_Place = tuple[nn.Module, str]
_Versions = dict[_Place, tuple[Tensor, int]]


class _Kept(NamedTuple):
    """Hold what a forward began with: copies of buffers, the versions of the others, and states of generators."""

    copies: dict[_Place, Tensor]
    versions: _Versions
    drawn: dict[str, Any]
    changes: Changes


class BlockState:
    """Let ``block`` run again with the state that its forward began with, without changing the state a second time.

    The state consists of the values of buffers, of the content of lists and other containers, and of random numbers.
    torch restores the states of its own generators; this class restores those of Python, of NumPy, and of generators
    that are attributes of the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._containers = BlockContainers(block)
        self._changing: dict[bool, set[_Place]] = {}
        """The large buffers that the first forward changed, by ``block.training``; those of norms are always copied."""

    def begin(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that returns contexts: the first one for the forward, the others for its reruns.

        A context raises a RuntimeError if a large buffer, of which there is no copy, has changed in place.
        """
        kept: list[_Kept] = []

        @contextmanager
        def context() -> Iterator[None]:
            if not kept:
                known = self._changing.get(self._block.training)
                buffers = dict(self._buffers())
                copies = {place: b.detach().clone() for place, b in buffers.items() if _is_copied(place, b, known)}
                versions = {place: (b, _version(b)) for place, b in buffers.items() if place not in copies}
                drawn = self._drawn()
                with self._containers.recorded() as changes:
                    yield
                if known is None:
                    versions.update(self._forget_unchanged(copies))
                self._check(versions, "a forward of it")
                kept.append(_Kept(copies, versions, drawn, changes))
                return
            self._check(kept[0].versions, "the step, between a forward and its backward,")
            now, drawn_now = dict(self._buffers()), self._drawn()
            # Buffers are replaced rather than changed in place, since autograd may have saved them for the backward.
            _put({place: buffer.clone() for place, buffer in kept[0].copies.items()})
            self._draw_from(kept[0].drawn)
            try:
                with undone(kept[0].changes, self._containers.packages):
                    yield
            finally:
                _put({place: buffer for place, buffer in now.items() if place in kept[0].copies})
                self._draw_from(drawn_now)

        return context

    def _buffers(self) -> Iterator[tuple[_Place, Tensor]]:
        for module in self._block.modules():
            for key, buffer in own_buffers(module).items():
                if buffer is not None:
                    yield (module, key), buffer

    def _forget_unchanged(self, copies: dict[_Place, Tensor]) -> _Versions:
        """Drop the copies of large buffers that the first forward has not changed, and return their versions."""
        unchanged = {
            place: buffer
            for place, buffer in self._buffers()
            if not _is_copied(place, buffer, set()) and place in copies and _is_equal(buffer, copies[place])
        }
        for place in unchanged:
            del copies[place]
        self._changing[self._block.training] = set(copies)
        return {place: (buffer, _version(buffer)) for place, buffer in unchanged.items()}

    def _check(self, versions: _Versions, what: str) -> None:
        for (module, key), (buffer, version) in versions.items():
            if _version(buffer) != version:
                name = next(name for name, found in self._block.named_modules() if found is module)
                raise RuntimeError(
                    f"activation_checkpointing: {what} has changed the buffer {f'{name}.{key}'.lstrip('.')!r} of a"
                    f" {type(self._block).__name__}, which the first forward did not change. It has {buffer.numel():,}"
                    f" elements, more than the {_FEW:,} up to which buffers are copied, so that the forward cannot be"
                    " repeated. Assign a new tensor in place of changing this one, or leave activation_checkpointing"
                    " out."
                )

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


def _is_copied(place: _Place, buffer: Tensor, known: set[_Place] | None) -> bool:
    """Return whether a buffer is copied before a forward; before the first one, all are, and ``known`` is None."""
    return known is None or place in known or buffer.numel() <= _FEW or isinstance(place[0], NORM)


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else version_of(buffer)


def _is_equal(buffer: Tensor, kept: Tensor) -> bool:
    return buffer.shape == kept.shape and torch.equal(buffer, kept)


def _put(buffers: Mapping[_Place, Tensor]) -> None:
    for (module, key), buffer in buffers.items():
        own_buffers(module)[key] = buffer
