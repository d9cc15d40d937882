"""Test how the time of a step is put together from operations and messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dist.plugins.planning import Layout, Planned, Where
from lightning_dist.plugins.planning.dry_run import DryRun
from lightning_dist.plugins.planning.estimates import Estimates, base_layouts, batches_are_divided
from lightning_dist.plugins.planning.figures import DeviceSpeed, Link, Links
from lightning_dist.plugins.planning.operation_times import measured_seconds
from lightning_dist.plugins.planning.picture import draw_plan, frontier
from lightning_dist.plugins.planning.step_time import Busy, StepTime, messages, step_time
from lightning_dist.run.simulation import Message, Operation, Shape, Work, simulate_rank
from lightning_dist.run.telemetry.batch import BatchSize

F32 = torch.float32
SPEED = DeviceSpeed("device", {F32: 1e12}, 1e11, 1e-5)
LINKS = Links("links", {"": Link(1e-4, 1e9, 2)}, {"": Link(1e-3, 1e8, 2)})
GPUS = Where(4, SPEED, LINKS)
CPUS = Where(4, replace(SPEED, num_cores=2), LINKS)
BUSY = Busy(compute=1.0, optimizer=0.1, host=0.5, fill=0.0)


def run_of(layout: Layout, work: Work, axes: dict[str, tuple[str, ...]], peak: int = 100, resident: int = 40) -> DryRun:
    return DryRun(0, resident, peak, work, Work(), BatchSize(8, 64), axes, layout.num_data_parallel, 1)


def test_an_operation_takes_the_longer_of_computation_and_memory() -> None:
    assert SPEED.seconds(Operation("aten.mm.default", None, 2 * 10**12, 10**9, F32)) == 2
    assert SPEED.seconds(Operation("aten.mm.default", None, 10**9, 10**12, F32)) == 10
    measured = Operation("aten.mm.default", (), 1, 1, F32)
    assert replace(SPEED, measured={measured: 7.0}).seconds(measured) == 7


def test_a_message_takes_a_latency_and_what_the_slowest_rank_sends() -> None:
    assert LINKS.seconds(Message("all_reduce", 10**9, ""), 2, 1) == pytest.approx(1e-4 + 1)
    assert LINKS.seconds(Message("all_gather", 10**9, ""), 4, 1) == pytest.approx(3e-4 + 0.75)
    assert LINKS.seconds(Message("all_gather", 10**8, ""), 4, 2) == pytest.approx(3e-3 + 0.75)
    assert LINKS.seconds(Message("all_gather", 10**9, ""), 1, 1) == 0


def test_accelerators_send_while_they_compute_except_what_the_next_layer_needs() -> None:
    sent = {"dp_shard": 1.5, "tp": 0.25}
    time = step_time(Layout(dp_shard=4, tp=2), BUSY, sent, GPUS)
    assert time.communication == {"dp_shard": 0.5, "tp": 0.25}
    assert (time.bubble, time.host) == (0, 0)
    assert time.total == pytest.approx(1 + 0.75 + 0.1)
    assert step_time(Layout(tp=2), replace(BUSY, host=1.4), {}, GPUS).host == pytest.approx(0.3)


def test_what_is_sent_while_a_device_computes_is_added_up() -> None:
    time = step_time(Layout(dp_replicate=2, dp_shard=4), BUSY, {"dp_shard": 0.8, "dp_replicate": 0.7}, GPUS)
    assert sum(time.communication.values()) == pytest.approx(0.5)
    both = step_time(Layout(dp_shard=4, cp=2), BUSY, {"dp_shard x cp": 0.8, "cp": 0.1}, GPUS)  # These share parameters.
    assert both.communication == {"dp_shard x cp": 0.0, "cp": 0.1}


def test_a_stage_waits_for_the_others() -> None:
    assert step_time(Layout(pp=2), replace(BUSY, fill=1 / 4), {}, GPUS).bubble == pytest.approx(1 / 4)
    assert step_time(Layout(pp=4), replace(BUSY, fill=3 / 4), {}, GPUS).bubble == pytest.approx(3 / 4)


def test_ranks_that_share_cores_take_turns() -> None:
    time = step_time(Layout(dp_shard=4), BUSY, {}, CPUS)
    assert (time.compute, time.optimizer, time.host) == (2, 0.2, 1)
    # With two ranks for each core, others work while a stage waits.
    assert step_time(Layout(pp=4), replace(BUSY, fill=3 / 4), {}, CPUS).bubble == 0
    assert step_time(Layout(pp=2), replace(BUSY, fill=1 / 4), {}, CPUS).bubble == pytest.approx(1.5 / 4)


@pytest.mark.parametrize(
    ("layout", "axes", "between"),
    [
        (Layout(dp_shard=8), ("dp_shard",), True),
        (Layout(dp_replicate=2, dp_shard=4), ("dp_shard",), False),
        (Layout(dp_replicate=2, dp_shard=4), ("dp_replicate",), True),
        (Layout(pp=2, dp_shard=2, tp=2), ("pp",), True),
        (Layout(pp=2, dp_shard=2, tp=2), ("dp_shard", "tp"), False),
    ],
)
def test_groups_of_several_nodes_use_the_links_between_them(
    layout: Layout, axes: tuple[str, ...], between: bool
) -> None:
    work = Work(messages=Counter({Message("broadcast", 10**8, "group"): 1}))
    ((_, seconds),) = messages(layout, run_of(layout, work, {"group": axes}), GPUS).items()
    assert (seconds > 0.9) == between


def test_the_operations_and_messages_of_a_simulated_rank_are_counted() -> None:
    with simulate_rank(4, 0, "gloo") as simulation:
        layer, data = nn.Linear(64, 32, bias=False), torch.zeros(16, 64)
        simulation.work.work = work = Work()
        layer(data).sum().backward()
        dist.all_reduce(torch.zeros(1000))
        dist.all_gather_into_tensor(torch.zeros(4000), torch.zeros(1000))
        simulation.work.work = None
        layer(data)
    products = [operation for operation in work.operations.elements() if operation.flops]
    assert sum(operation.flops for operation in products) == work.model_flops == 2 * 2 * 16 * 64 * 32
    assert products[0].arguments is not None
    assert products[0].arguments[0][0] == Shape((16, 64), (64, 1), F32)
    assert products[0].num_bytes == 4 * (16 * 64 + 64 * 32 + 16 * 32)
    group = next(iter(work.groups))
    assert work.messages == {Message("all_reduce", 4000, group): 1, Message("all_gather", 16000, group): 1}
    assert work.groups == {group: (0, 1, 2, 3)}


def test_operations_are_measured_as_they_are() -> None:
    def product(rows: int, columns: int) -> Operation:
        shape = Shape((rows, columns), (columns, 1), F32)
        return Operation("aten.mm.default", ((shape, shape), ()), 2 * rows**3, 12 * rows**2, F32)

    small, large, unknown = product(32, 32), product(768, 768), product(2, 3)
    found = measured_seconds([small, large, unknown], torch.device("cpu"), 1)
    assert found.keys() == {small, large}
    assert 20 * found[small] < found[large] < 1


def test_estimates_divide_what_two_ranks_divide() -> None:
    layouts = [Layout(dp_shard=16, tp=4), Layout(dp_replicate=64), Layout(dp_shard=64), Layout(dp_shard=8, pp=8)]
    runs: dict[Layout, list[DryRun] | str] = {}
    for base in base_layouts(layouts, recomputes=True):
        # Of 100 resident bytes, 20 stay on each rank; of 400 others, tp divides the half, and the rest is activations.
        resident = 20 + 80 // (base.dp_shard * base.tp)
        others = (200 + 200 // base.tp) // (4 if base.recomputes else 1)
        runs[base] = [run_of(base, Work(), {}, resident + others, resident)]
    runs[replace(base_layouts(layouts, False)[0], pp=2)] = "it has no stages"
    estimate = Estimates(runs, None)
    both = estimate(Layout(dp_shard=16, tp=4))
    alone = estimate(Layout(dp_shard=16))
    assert (alone.resident, alone.peak) == (25, 425)
    assert both.resident == pytest.approx(25 * (1 / 3 + 2 / 3 / 4), abs=1)
    assert (both.peak or 0) - (both.resident or 0) == pytest.approx(200 + 200 / 4, abs=1)
    assert estimate(Layout(dp_shard=16).having(activation_checkpointing="full")).peak == pytest.approx(25 + 100, abs=1)
    assert estimate(Layout(dp_shard=8, pp=8)).why_not == "it has no stages"
    assert both.is_estimated


def test_estimates_know_that_a_global_batch_is_divided() -> None:
    layouts = [Layout(dp_replicate=4, dp_shard=16)]
    runs: dict[Layout, list[DryRun] | str] = {}
    for base in base_layouts(layouts, recomputes=False):
        samples = 64 // base.num_data_parallel
        resident = 20 + 80 // base.dp_shard
        run = run_of(base, Work(model_flops=3 * samples), {}, resident + 50 + 10 * samples, resident)
        runs[base] = [replace(run, batch=BatchSize(samples, 8 * samples))]
    estimate = Estimates(runs, None)
    found = estimate(layouts[0])
    assert found.batch == BatchSize(1, 8)
    assert (found.resident, found.peak, found.model_flops) == (25, 25 + 50 + 10, 3)
    assert estimate(Layout(dp_replicate=3)).why_not == "A batch of 64 samples cannot be divided among 3 ranks."
    assert batches_are_divided(runs.values())
    equal = {base: [replace(run, batch=BatchSize(8, 64)) for run in found] for base, (*found,) in runs.items()}
    assert not batches_are_divided(equal.values())
    assert batches_are_divided([equal[base] for base in list(equal)[:1]])


def test_mfu_is_the_fraction_of_the_devices_rate_in_the_dtype_of_most_products() -> None:
    layout, bf16 = Layout(dp_shard=2), torch.bfloat16
    product = Operation("aten.mm.default", None, 2 * 10**12, 10**9, bf16)
    other = Operation("aten.mm.default", None, 10**10, 10**9, F32)
    run = run_of(layout, Work(Counter({product: 2, other: 1}), model_flops=4 * 10**12), {})
    where = replace(GPUS, speed=replace(SPEED, flops_per_s={F32: 1e12, bf16: 2e12}, peaks={bf16: 4e12}))
    planned = Planned.of(layout, [run], where)
    assert planned.time is not None
    assert planned.time.compute == pytest.approx(2.01, abs=1e-3)
    assert planned.mfu == pytest.approx(4e12 / (planned.time.total * 4e12))
    assert Planned.of(layout, [run], GPUS).mfu == 0


def test_a_plan_is_drawn(tmp_path) -> None:
    def planned(layout: Layout, peak: int, seconds: float) -> Planned:
        return Planned(layout, 1, peak, time=StepTime(seconds, {}, 0, 0, 0), batch=BatchSize(8, 64))

    slow, fast = planned(Layout(dp_shard=4), 50, 2.0), planned(Layout(4), 90, 1.0)
    useless, large = planned(Layout(2, 2), 91, 1.5), planned(Layout(dp_shard=2, tp=2), 99, 0.1)
    all_ = [fast, useless, slow, large]
    assert frontier(all_, 105) == [slow, fast]
    assert frontier(all_, None) == [slow, fast, large]
    draw_plan(all_, 105, 2, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="no layout has a predicted time"):
        draw_plan([Planned(Layout(2))], None, 2, tmp_path / "none.png")
