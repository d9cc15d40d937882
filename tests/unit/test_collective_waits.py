"""Waits for collectives are counted where a step waits, and nowhere else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dist.mesh.collective_waits import CollectiveWaits, waiting
from lightning_dist.mesh.device_clock import DeviceClock
from lightning_dist.run.telemetry import PhaseTimer

CPU = torch.device("cpu")


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


class Events(DeviceClock):
    """Record points as CUDA does: a point is reached after the work that was queued before it."""

    def __init__(self, time: Time) -> None:
        super().__init__(CPU, time)
        self.uses_events = True
        self.current = "compute"
        self.num_recorded = 0

    @property
    def stream(self) -> Any:
        return self.current

    def now(self) -> Any:
        self.num_recorded += 1
        return self._clock()

    def seconds(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def time() -> Time:
    return Time()


def test_waits_of_the_training_thread_are_counted_while_something_measures(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    monkeypatch.setattr(dist.Work, "wait", lambda self: time.pass_s(2))
    original = dist.Work.wait
    waits = CollectiveWaits(DeviceClock(CPU, time))
    work = dist.Work()
    work.wait()
    waits.install()
    work.wait()  # It is not counted yet.
    waits.is_counting = True
    work.wait()
    assert waiting(lambda: time.pass_s(3) or "result") == "result"
    thread = threading.Thread(target=work.wait)  # Such as the one that writes checkpoints.
    thread.start()
    thread.join()
    assert waits.lap() == 5
    assert waits.lap() == 0
    waits.remove()
    waits.remove()
    assert dist.Work.wait is original


def test_two_observers_count_the_same_waits(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    monkeypatch.setattr(dist.Work, "wait", lambda self: time.pass_s(2))
    first, second = (CollectiveWaits(DeviceClock(CPU, time)) for _ in range(2))
    for waits in (first, second):
        waits.install()
        waits.is_counting = True
    dist.Work().wait()
    first.remove()
    dist.Work().wait()
    second.remove()
    assert (first.lap(), second.lap()) == (2, 4)


def test_on_streams_the_waits_of_the_computing_stream_are_counted(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: time.pass_s(2))
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda self: time.pass_s(5))
    clock = Events(time)
    waits = CollectiveWaits(clock)
    waits.install()
    waits.is_counting = True
    torch.cuda.Stream.wait_event(object(), object())
    dist.ProcessGroup.allreduce(object())
    clock.current = "all-gather"
    torch.cuda.Stream.wait_event(object(), object())
    waits.remove()
    assert waits.lap() == 7
    assert clock.num_recorded == 4


def test_phases_are_timed_by_the_borders_that_the_device_reaches(time: Time) -> None:
    clock = Events(time)
    phases = PhaseTimer(clock)
    for phase, seconds in (("data", 1), ("forward", 2), ("forward", 3), (None, 4), ("data", 5), (None, 6)):
        phases.enter(phase)
        time.pass_s(seconds)
    assert phases.lap() == {"data": 6, "forward": 5}
    assert clock.num_recorded == 5  # A phase that goes on has no border.
