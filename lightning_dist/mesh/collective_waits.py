"""Add up the time in which a rank waits for collectives, wherever the waits are in its code.

A step waits for other ranks in many places: in FSDP2 and torch's pipeline schedules, in this package's techniques, in
metrics and in the user's own code. Nearly all of them are in ``Work.wait`` or in a method of ``ProcessGroup``, which
are therefore observed while something measures. A wait that is elsewhere calls :func:`waiting` itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_dist import _compat
from lightning_dist.mesh.device_clock import DeviceClock

__all__ = ["CollectiveWaits", "waiting"]


class CollectiveWaits:
    """Add up the time in which the steps of this rank wait for collectives.

    With times of the host, this is the time that the thread that created this object spends in collectives and in
    waits for them. With CUDA events, it is the time in which the stream that is now the current one runs a collective
    itself, or does nothing because it waits for another stream.

    Args:
        clock: Clock that records the beginning and the end of each wait, and that nothing else uses.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._stream = clock.stream
        self._waits: list[tuple[Any, Any]] = []
        self.is_counting = False
        """Whether waits are counted now."""

    def install(self) -> None:
        """Observe all waits until :meth:`remove` is called."""
        if not _observers:
            _observation.enter_context(_compat.around_collectives(waiting, self._clock.uses_events))
        _observers.append(self)

    def remove(self) -> None:
        """Stop observing; do nothing if this object does not observe."""
        if self in _observers:
            _observers.remove(self)
            if not _observers:
                _observation.close()

    @property
    def counts_here(self) -> bool:
        """Return whether a wait that begins now is counted.

        Waits of the threads that write checkpoints, or that compress gradients beside the backward, hold up no step.
        """
        if not self.is_counting or self._clock.stream != self._stream:
            return False
        return threading.get_ident() == self._thread or _compat.is_in_backward()

    def count(self, call: Callable[[], Any]) -> Any:
        """Call ``call`` and return its result; the time that it takes is a wait."""
        start = self._clock.now()
        try:
            return call()
        finally:
            self._waits.append((start, self._clock.now()))

    def lap(self) -> float:
        """Return the seconds added up since the last call, and reset them; the device must have reached all waits."""
        seconds = sum(self._clock.seconds(start, end) for start, end in self._waits)
        self._waits.clear()
        self._clock.forget()
        return seconds


_observers: list[CollectiveWaits] = []
_observation = ExitStack()


def waiting(call: Callable[[], Any]) -> Any:
    """Call ``call``, which does nothing but wait for other ranks, and return its result; observers count its time."""
    for observer in _observers:
        if observer.counts_here:
            call = partial(observer.count, call)
    return call()
