"""Read the time at which a device reaches a point of its work, without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """Record points in time in the work of a device.

    On an accelerator a point is an event in the current stream, which takes its time when the device reaches it. On the
    CPU a point is the time at which the host records it.

    Args:
        device: Device whose work is timed.
        clock: Function that returns the current time of the host in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self.uses_events = device.type not in ("cpu", "mps")
        """Whether points are events, which take longer to record than a time of the host."""
        self._device = device
        self._module: Any = torch.get_device_module(device.type) if self.uses_events else None
        self._clock = clock
        self._events: list[Any] = []
        self._num_used = 0

    @property
    def stream(self) -> Any:
        """Return the stream in which points are recorded now; None: there are no streams."""
        return self._module.current_stream(self._device) if self.uses_events else None

    def now(self) -> Any:
        """Record a point in time, and return it for :meth:`seconds`."""
        if not self.uses_events:
            return self._clock()
        if self._num_used == len(self._events):
            self._events.append(self._module.Event(enable_timing=True))
        event = self._events[self._num_used]
        self._num_used += 1
        event.record(self.stream)
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two points, which the device must have reached."""
        return float(start.elapsed_time(end) / 1000 if self.uses_events else end - start)

    def wait_for(self, point: Any) -> None:
        """Wait until the device has reached ``point``."""
        if self.uses_events:
            point.synchronize()

    def forget(self) -> None:
        """Reuse the events of all points from now on; the points returned so far must no longer be used."""
        self._num_used = 0
