"""Measure the time of training steps, excluding validation, checkpoints and other work between them."""

from collections.abc import Callable
from time import perf_counter


class Stopwatch:
    """Add up the time between each ``start`` and the next ``stop``.

    Args:
        clock: Function that returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._started_at: float | None = None
        self._seconds = 0.0

    @property
    def running(self) -> bool:
        """Return whether the watch is running."""
        return self._started_at is not None

    def start(self) -> None:
        """Start the watch; do nothing if it is running."""
        if self._started_at is None:
            self._started_at = self._clock()

    def stop(self) -> None:
        """Stop the watch; do nothing if it is not running."""
        if self._started_at is not None:
            self._seconds += self._clock() - self._started_at
            self._started_at = None

    def lap(self) -> float:
        """Return the seconds added up since the last call, and reset them to 0; a running watch keeps running."""
        running = self.running
        self.stop()
        seconds, self._seconds = self._seconds, 0.0
        if running:
            self.start()
        return seconds


class StepTimer:
    """Time optimizer steps over an interval without synchronizing the device at every step.

    Kernels run asynchronously to the host. ``synchronize`` is therefore called when the interval is read, and before
    and after work that is not training (validation, a checkpoint), but not for single steps.

    Args:
        synchronize: Function that waits for the device's queued work; None for devices without a queue.
        clock: Function that returns the current time in seconds.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._synchronize = synchronize
        self._watch = Stopwatch(clock)
        self._steps = 0

    @property
    def running(self) -> bool:
        """Return whether time counts as training now."""
        return self._watch.running

    def resume(self) -> None:
        """Start to count time; do nothing if the timer is running."""
        if not self.running:
            self._wait()
            self._watch.start()

    def pause(self) -> bool:
        """Stop counting time, and return whether the timer was running."""
        was_running = self.running
        if was_running:
            self._wait()
            self._watch.stop()
        return was_running

    def step(self) -> None:
        """Count an optimizer step that has ended."""
        self._steps += 1

    def lap(self) -> tuple[int, float]:
        """Return the number of steps and the seconds of training since the last call, and reset both to 0."""
        if self.running:
            self._wait()
        steps, self._steps = self._steps, 0
        return steps, self._watch.lap()

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
