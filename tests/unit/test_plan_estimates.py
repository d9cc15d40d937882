"""Test that a plan of many layouts, of which most are estimated, ends with the best one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from lightning_dist.plugins.planning import Layout, layouts_of, plan
from lightning_dist.plugins.planning.dry_run import DryRun
from lightning_dist.plugins.planning.figures import DeviceSpeed, Links
from lightning_dist.plugins.planning.step_time import Where
from lightning_dist.run.simulation import Operation, Work
from lightning_dist.run.telemetry.batch import BatchSize

GIB = 2**30
WHERE = Where(8, DeviceSpeed.from_data_sheet("h100"), Links.assumed("h100", "nccl"))


def outcome(layout: Layout) -> DryRun:
    """Return the dry run of a layout, whose pipelines of more than two stages compute four times longer than others.

    Ranks that split layers compute more than their part, so that pipelines seem to be the fastest.
    """
    parts = layout.tp * layout.cp * layout.pp
    flops = 10**15 // parts * (4 if layout.pp > 2 else 1) * (3 if layout.tp * layout.cp > 1 else 2)
    work = Work(Counter({Operation("mm", None, flops, 0, torch.float32): 1}), model_flops=flops)
    resident = 200 * GIB // (layout.tp * layout.pp * layout.dp_shard)
    peak = resident + 200 * GIB // parts
    num_microbatches = dict(layout.options).get("num_microbatches", 2 * layout.pp)
    fill = (layout.pp - 1) / num_microbatches
    batch = BatchSize(32, 0)
    return DryRun(0, resident, peak, work, Work(), batch, {}, layout.num_data_parallel, num_microbatches, 1, fill)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """Return a list that gets the layout of each dry run, none of which is really made."""
    made: list[Layout] = []

    def forked(calls: Sequence[partial[Any]], at_once: int) -> Iterator[tuple[int, DryRun, None]]:
        for index, call in enumerate(calls):
            (layout,) = call.args[0].args
            made.append(layout)
            yield index, outcome(layout), None

    module = sys.modules["lightning_dist.plugins.planning.plan"]
    monkeypatch.setattr(module, "in_forks", forked)
    monkeypatch.setattr(module, "_at_once", lambda: 2)
    return made


def make(layout: Layout) -> Any:
    raise AssertionError(layout)


def test_estimates_that_are_too_fast_are_corrected_by_dry_runs_of_others(runs: list[Layout]) -> None:
    layouts = layouts_of(8, 8)
    found = plan(make, layouts, 80 * GIB, "nccl", lambda operations: WHERE)
    exact = [one for one in found if not one.is_estimated]
    assert not found[0].is_estimated
    assert found[0].layout.pp <= 2
    assert found[0].samples_per_s == max(one.samples_per_s for one in exact)
    assert found[0].samples_per_s == pytest.approx(found[0].layout.num_data_parallel * 32 / step_s(found[0].layout))
    assert len(exact) <= 2 * 2 + 5
    refuted = {(one.layout.tp > 1, one.layout.cp > 1) for one in exact if one.layout.pp > 2}
    assert refuted  # The estimates of these were too fast.
    for one in found:
        layout, time = one.layout, one.time
        is_corrected = layout.pp > 2 and (layout.tp > 1, layout.cp > 1) in refuted
        if one.is_estimated and is_corrected and time and not layout.options:
            assert time.total == pytest.approx(step_s(layout), rel=0.5), layout


def test_layouts_are_tried_if_the_small_ones_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts on 4 ranks, for example, cannot be on two of them."""

    def forked(calls: Sequence[partial[Any]], at_once: int) -> Iterator[tuple[int, DryRun | None, Exception | None]]:
        for index, call in enumerate(calls):
            (layout,) = call.args[0].args
            yield (index, None, ValueError("ep_size=4 needs it")) if layout.dp_shard < 4 else (
                index, outcome(layout), None
            )  # fmt: skip

    module = sys.modules["lightning_dist.plugins.planning.plan"]
    monkeypatch.setattr(module, "in_forks", forked)
    monkeypatch.setattr(module, "_at_once", lambda: 2)
    found = plan(make, layouts_of(8, 8), None, "nccl", lambda operations: WHERE)
    assert found[0].peak and found[0].layout.dp_shard >= 4 and not found[0].is_estimated
    assert found[-1].why_not == "ep_size=4 needs it"


def test_more_microbatches_are_tried_for_a_pipeline(runs: list[Layout]) -> None:
    pipeline = Layout(dp_shard=8, pp=4)
    found = plan(make, [pipeline], 80 * GIB, "nccl", lambda operations: WHERE)
    assert found[0].layout == pipeline.having(num_microbatches=16)  # Stages wait for 3 / 16 of the time, not 3 / 8.
    assert pipeline.having(num_microbatches=4) in runs
    runs.clear()
    plan(make, [pipeline], 80 * GIB, "nccl", lambda operations: WHERE, given={"num_microbatches"})
    assert not any("num_microbatches" in dict(layout.options) for layout in runs)


def step_s(layout: Layout) -> float:
    """Return the seconds of a step of :func:`outcome`: of its product, and of the wait for other stages."""
    run = outcome(layout)
    seconds = sum(WHERE.speed.seconds(operation) for operation in run.work.operations)
    return seconds * (1 + (layout.pp - 1) / run.num_microbatches)
