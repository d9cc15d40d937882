"""Add up the time that training steps spend in each of their phases."""

from collections import defaultdict
from typing import Any, Literal

from lightning_dist.mesh.device_clock import DeviceClock

Phase = Literal["data", "forward", "backward", "optimizer"]


class PhaseTimer:
    """Add up the time of each phase, of which at most one runs at a time.

    On CUDA a phase begins and ends when the device reaches the events that mark its borders. It contains the work that
    the host has queued in between, and the time in which the device had nothing to do there.

    Args:
        clock: Clock that records the borders, and that nothing else uses.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._phase: Phase | None = None
        self._start: Any = None
        self._spans: list[tuple[Phase, Any, Any]] = []

    def enter(self, phase: Phase | None) -> None:
        """End the phase that runs, and begin ``phase``; None: time is added to no phase from now on."""
        if phase is self._phase:
            return
        now = self._clock.now()
        if self._phase is not None:
            self._spans.append((self._phase, self._start, now))
        self._phase, self._start = phase, now

    def lap(self) -> dict[Phase, float]:
        """Return the seconds of each phase since the last call, and reset them.

        No phase may run, and the device must have reached the end of the last one.
        """
        seconds: defaultdict[Phase, float] = defaultdict(float)
        for phase, start, end in self._spans:
            seconds[phase] += self._clock.seconds(start, end)
        self._spans.clear()
        self._clock.forget()
        return seconds
