"""Clocks for the training loop that leave out what is not training."""

from collections.abc import Callable
from time import perf_counter


class Stopwatch:
    """Adds up the spans between ``start`` and ``stop``.

    Args:
        clock: Returns the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._started_at: float | None = None
        self._seconds = 0.0

    @property
    def running(self) -> bool:
        """Whether time is being added up now."""
        return self._started_at is not None

    def start(self) -> None:
        """Begin a span; does nothing inside one."""
        if self._started_at is None:
            self._started_at = self._clock()

    def stop(self) -> None:
        """End the span; does nothing outside one."""
        if self._started_at is not None:
            self._seconds += self._clock() - self._started_at
            self._started_at = None

    def lap(self) -> float:
        """Return the seconds added up since the last lap and begin anew; a span in progress goes on into the next."""
        running = self.running
        self.stop()
        seconds, self._seconds = self._seconds, 0.0
        if running:
            self.start()
        return seconds


class StepTimer:
    """Times optimizer steps over an interval, without making a device wait in between.

    Kernels run behind the host, so a span begins and ends with ``synchronize``: when the interval is read, and around
    what is not training (validation, a checkpoint). No single step is synchronized.

    Args:
        synchronize: Waits for the device's queued work, where there is such a queue.
        clock: Returns the present time in seconds.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._synchronize = synchronize
        self._watch = Stopwatch(clock)
        self._steps = 0

    @property
    def running(self) -> bool:
        """Whether time counts as training now."""
        return self._watch.running

    def resume(self) -> None:
        """Count the time from here on; does nothing while running."""
        if not self.running:
            self._wait()
            self._watch.start()

    def pause(self) -> bool:
        """Stop counting; return whether the timer was running."""
        was_running = self.running
        if was_running:
            self._wait()
            self._watch.stop()
        return was_running

    def step(self) -> None:
        """Say that an optimizer step has ended."""
        self._steps += 1

    def lap(self) -> tuple[int, float]:
        """Return the steps and the seconds since the last lap, and begin anew."""
        if self.running:
            self._wait()
        steps, self._steps = self._steps, 0
        return steps, self._watch.lap()

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
