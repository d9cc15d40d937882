"""Measure where the time of training steps goes: their phases, and the waits for other ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import nan
from time import perf_counter

import torch

from lightning_dist.mesh.collective_waits import CollectiveWaits
from lightning_dist.mesh.device_clock import DeviceClock
from lightning_dist.run.telemetry.phases import Phase, PhaseTimer
from lightning_dist.run.telemetry.step_timer import StepTimer


@dataclass(frozen=True)
class StepTimes:
    """Hold the times of an interval of training steps on this rank.

    Args:
        num_steps: Number of optimizer steps.
        seconds: Seconds of all steps together.
        phases: Seconds in each phase, of all steps together.
        waits: Seconds of all steps together in which this rank waited for collectives, computed from the steps in which
            waits were counted; NaN: they were counted in none.
    """

    num_steps: int
    seconds: float
    phases: dict[Phase, float]
    waits: float


class StepMeter:
    """Measure intervals of training steps without making the host wait for the device in a step.

    On an accelerator, where counting a wait takes microseconds, waits are counted in the steps for which this is asked.
    On the CPU, they are counted in all steps.

    Args:
        device: Device on which the steps run.
        clock: Function that returns the current time of the host in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        phase_clock = DeviceClock(device, clock)
        has_streams = phase_clock.uses_events
        synchronize = partial(torch.get_device_module(device.type).synchronize, device) if has_streams else None
        self._timer = StepTimer(synchronize, clock)
        self._phases = PhaseTimer(phase_clock)
        self._waits = CollectiveWaits(DeviceClock(device, clock))
        self._counts_all_waits = not has_streams
        self._num_counted = 0
        self._counts_this_step = False

    def start(self) -> None:
        """Begin to observe waits, until :meth:`close`."""
        self._waits.install()

    def close(self) -> None:
        """Stop observing waits."""
        self._waits.remove()

    def resume(self) -> None:
        """Start to count time; do nothing if it is counted."""
        self._timer.resume()
        self._waits.is_counting = self._counts_all_waits or self._counts_this_step

    def pause(self) -> bool:
        """Stop counting time, for work that is not training, and return whether it was counted."""
        self._phases.enter(None)
        self._waits.is_counting = False
        return self._timer.pause()

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase of the step, which ends the one before; None: a part of the step that is in no phase."""
        if self._timer.running:
            self._phases.enter(phase)

    def begin_step(self, count_waits: bool) -> None:
        """Begin a step.

        Args:
            count_waits: Whether to count waits in this step even if counting them takes long.
        """
        self._counts_this_step = count_waits
        self._waits.is_counting = self._timer.running and (count_waits or self._counts_all_waits)

    def step(self) -> None:
        """Count an optimizer step that has ended."""
        self._timer.step()
        self._num_counted += self._waits.is_counting
        self._counts_this_step, self._waits.is_counting = False, self._waits.is_counting and self._counts_all_waits

    def lap(self) -> StepTimes:
        """Return the times since the last call, and reset them."""
        self._phases.enter(None)
        num_steps, seconds = self._timer.lap()
        num_counted, self._num_counted = self._num_counted, 0
        waits = self._waits.lap()
        scaled = waits * num_steps / num_counted if num_counted else nan
        return StepTimes(num_steps, seconds, self._phases.lap(), scaled)
