"""Simulated schedules have the bubbles of the formulas, and timelines of ranks whose clocks differ are aligned."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from lightning_dist.mesh.timeline import Action, Order, Recorder, Span, Timeline, aligned
from lightning_dist.techniques.pipeline.schedules import SCHEDULES, order_of, stages_of
from lightning_dist.techniques.pipeline.simulation import simulate
from tests.pool import WorkerPool


def order_under(name: str, pp_size: int, num_microbatches: int, virtual_stages: int) -> Order:
    """Return the order of actions of torch's schedule, made on rank 0 of a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=pp_size)
    known = SCHEDULES[name]
    own = stages_of(0, pp_size, virtual_stages, known.is_v)
    stages: Any = [
        PipelineStage(nn.Identity(), stage, pp_size * virtual_stages, torch.device("cpu"), group=dist.group.WORLD)
        for stage in own
    ]
    schedule = known.torch_class(
        stages if known.virtual_stages > 1 else stages[0], num_microbatches, loss_fn=lambda output, target: output
    )
    return order_of(schedule, pp_size, num_microbatches)


@pytest.mark.parametrize(
    ("name", "pp_size", "num_microbatches", "virtual_stages"),
    [
        ("gpipe", 4, 8, 1),
        ("gpipe", 8, 32, 1),
        ("1f1b", 2, 2, 1),
        ("1f1b", 4, 8, 1),
        ("1f1b", 8, 32, 1),
        ("interleaved_1f1b", 4, 8, 2),
        ("interleaved_1f1b", 8, 32, 2),
        ("interleaved_1f1b", 8, 32, 4),
        ("looped_bfs", 4, 8, 2),
    ],
)
def test_simulated_bubbles_equal_the_formulas(
    pool: WorkerPool, name: str, pp_size: int, num_microbatches: int, virtual_stages: int
) -> None:
    (order,) = pool.run(order_under, 1, name, pp_size, num_microbatches, virtual_stages)
    expected = (pp_size - 1) / (virtual_stages * num_microbatches + pp_size - 1)
    assert simulate(order).bubble == pytest.approx(expected, abs=1e-12)
    # The bubble does not depend on how long a backward takes.
    assert simulate(order, {"F": 1.0, "B": 1.5}).bubble == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_zero_bubble_schedules_have_smaller_bubbles_than_interleaved_1f1b(pool: WorkerPool, name: str) -> None:
    (order,) = pool.run(order_under, 1, name, 4, 16, 2)
    (interleaved,) = pool.run(order_under, 1, "interleaved_1f1b", 4, 16, 2)
    assert 0 <= simulate(order).bubble < simulate(interleaved).bubble
    assert all(len(actions) == len(set(actions)) for actions in order)


def test_an_order_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="for ever"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)]])


def test_clocks_are_aligned_by_the_messages_between_ranks(pool: WorkerPool) -> None:
    (order,) = pool.run(order_under, 1, "1f1b", 4, 8, 1)
    true = simulate(order)
    offsets = [0.0, 1234.5, -77.25, 0.125]
    shifted = [
        replace(span, start=span.start + offsets[span.rank], end=span.end + offsets[span.rank])
        for span in true.spans[::-1]
    ]
    found = aligned(Timeline(4, shifted))
    assert [span.action for span in found.spans] == [span.action for span in true.spans]
    assert [span.start for span in found.spans] == pytest.approx([span.start for span in true.spans])
    assert found.bubble == pytest.approx(true.bubble)


def test_a_slow_message_shifts_a_clock_by_half_of_its_delay() -> None:
    # The forward runs from 0 to 1 on rank 0 and from 4 to 5 on rank 1, and the backward on rank 0 from 6 to 7. So the
    # messages take 3 and 1.
    spans = [(0, "F", 0, 0, 1), (1, "F", 1, 4, 5), (1, "B", 1, 5, 5), (0, "B", 0, 6, 7)]
    timeline = Timeline(2, [Span(rank, Action(kind, stage, 0), a, b) for rank, kind, stage, a, b in spans])  # type: ignore[arg-type]
    assert [span.start for span in aligned(timeline).spans] == [0, 3, 4, 6]


def test_recording_an_action_takes_less_than_10_microseconds() -> None:
    recorder = Recorder(torch.device("cpu"))
    number = 10_000

    def seconds() -> float:
        recorder.begin()
        start = time.perf_counter()
        for index in range(number):
            recorder.add("F", 0, index, recorder.now())
        return (time.perf_counter() - start) / number

    assert min(seconds() for _ in range(5)) < 10e-6
    assert len(recorder.spans(0)) == number
    recorder.begin()
    assert recorder.spans(0) == []
