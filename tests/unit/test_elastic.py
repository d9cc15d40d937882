"""Replicas average over those that are there, send their state to one that joins, and refuse what cannot be elastic."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dist import DataParallelStrategy, FullShardStrategy, HybridShardStrategy, NDParallelStrategy
from lightning_dist.cli.launch.coordinator import let_replicas_gather
from lightning_dist.compression import LocalSGD
from lightning_dist.mesh import membership
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.mesh.membership import BehindError, Membership, MembershipOptions
from lightning_dist.mesh.replica_range import ReplicaRange
from lightning_dist.parallelize import options_from
from lightning_dist.parameters.memory_use import RunSize, predict
from lightning_dist.techniques.elastic import ElasticOptions
from lightning_dist.techniques.options import Fit, Run

os.environ.setdefault("RUST_LOG", "error")  # Torchft reads it when it is imported.
CPU = torch.device("cpu")


class Replicas:
    """Hold a coordinator, and the replicas of a run as threads of this process."""

    def __init__(self, largest: int) -> None:
        from torchft.coordination import LighthouseServer

        self._make_server = LighthouseServer
        self.start("127.0.0.1:0")
        self.largest = largest
        self.said: list[str] = []
        self.replicas: dict[int, Membership] = {}
        self.threads = ThreadPoolExecutor(8)

    def start(self, address: str, smallest: int = 1) -> None:
        """Start the coordinator."""
        self.server = self._make_server(
            bind=address, min_replicas=smallest, join_timeout_ms=60_000, quorum_tick_ms=20, heartbeat_timeout_ms=500
        )

    def start_again(self) -> None:
        """Start a coordinator that knows nothing at the address of the one that runs."""
        port = self.server.address().rpartition(":")[2]
        self.server.shutdown()
        while True:
            try:
                return self.start(f"127.0.0.1:{port}")
            except RuntimeError:  # The first one still has the port.
                time.sleep(0.05)

    def join(self, index: int, state: dict[str, Any] | None = None, **fingerprint: str) -> Membership:
        options = MembershipOptions(index, 1, self.largest, self.server.address(), timedelta(seconds=10))
        replica = Membership(options, CPU, {"code": "1", **fingerprint}, lambda: state or {}, self.said.append)
        self.replicas[index] = replica
        replica.join()
        return replica

    def at_once(self, *calls: Callable[[], Any]) -> list[Any]:
        """Call functions in threads at the same time, and return their results."""
        running: list[Future[Any]] = [self.threads.submit(call) for call in calls]
        return [one.result(30) for one in running]


@pytest.fixture
def run() -> Iterator[Replicas]:
    found = Replicas(2)
    yield found
    for replica in found.replicas.values():
        replica.close()
    found.server.shutdown()


def _step(replica: Membership, value: float) -> list[float]:
    replica.begin_step()
    means = replica.average(lambda: [torch.full((3,), value), torch.tensor([value], dtype=torch.float64)])
    return [mean[0].item() for mean in means]


def test_means_are_those_over_the_replicas_that_are_there(run: Replicas) -> None:
    first, second = run.at_once(lambda: run.join(0), lambda: run.join(1))
    assert first.members == second.members == (0, 1)
    assert run.at_once(lambda: _step(first, 1.0), lambda: _step(second, 4.0)) == [[2.5, 2.5], [2.5, 2.5]]
    second.close()
    assert _step(first, 1.0) == [1.0, 1.0]
    assert first.members == (0,)
    assert "Replica 1 left: 1 of 2 replicas train on, and replica 0 logs and writes checkpoints." in run.said


def test_a_replica_that_joins_gets_the_state_and_the_leader(run: Replicas) -> None:
    weights = torch.arange(4.0)
    first, second = run.at_once(lambda: run.join(0), lambda: run.join(1, {"weights": weights}))
    run.at_once(lambda: _step(first, 1.0), lambda: _step(second, 1.0))
    first.close()
    _step(second, 1.0)
    assert second.is_leader
    second.notes = {"run": "a"}
    joined = run.threads.submit(run.join, 0)
    while second.members != (0, 1):
        second.begin_step()
        if second.members == (0, 1):
            break
        second.average(lambda: [torch.ones(1)])
    first = joined.result(30)
    assert first.received is not None and torch.equal(first.received["weights"], weights)
    assert first.notes == {"run": "a"} and first.leader == 1
    assert run.at_once(lambda: _step(first, 1.0), lambda: _step(second, 2.0)) == [[1.5, 1.5], [1.5, 1.5]]


def test_a_reduction_that_loses_a_replica_is_repeated_without_it(run: Replicas) -> None:
    first, second = run.at_once(lambda: run.join(0), lambda: run.join(1))
    run.at_once(first.begin_step, second.begin_step)
    made = []

    def make() -> list[Tensor]:
        made.append(1)
        return [torch.full((2,), 3.0)]

    waiting = run.threads.submit(first.average, make)
    second.close()
    (mean,) = waiting.result(30)
    assert mean.tolist() == [3.0, 3.0] and len(made) == 2
    assert first.lost_s > 0
    assert run.said[-2:] == [
        "Replica 1 left: 1 of 2 replicas train on, and replica 0 logs and writes checkpoints.",
        "The gradients of this step are reduced again, so that it is not lost.",
    ]


def test_no_replica_waits_for_one_that_has_given_up() -> None:
    run = Replicas(3)
    first, second, third = replicas = run.at_once(*(lambda index=index: run.join(index) for index in range(3)))
    run.at_once(*(replica.begin_step for replica in replicas))
    big = [torch.ones(4_000_000) for _ in range(3)]  # The reduction takes a while, so that it is spoilt in its middle.
    waiting = [run.threads.submit(one.average, lambda: [tensor.clone() for tensor in big]) for one in (first, second)]
    time.sleep(0.02)
    third._group.abort()
    third.close()
    begin = time.monotonic()
    means = [one.result(30) for one in waiting]
    assert time.monotonic() - begin < 8  # A reduction waits for 10 s.
    assert all(torch.equal(mean, tensor) for found in means for mean, tensor in zip(found, big, strict=True))
    for replica in (first, second):
        replica.close()
    run.server.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_the_leader_are_shared_bit_by_bit(run: Replicas, dtype: torch.dtype) -> None:
    values = (torch.randn(5, 3) * 3).to(dtype)
    first, second = run.at_once(lambda: run.join(0), lambda: run.join(1))
    shared = run.at_once(lambda: first.share([values]), lambda: second.share([torch.zeros_like(values)]))
    assert all(torch.equal(found, values) for (found,) in shared)


def test_other_settings_are_refused(run: Replicas) -> None:
    running = [run.threads.submit(run.join, 0), run.threads.submit(lambda: run.join(1, code="2"))]
    running[0].result(30)
    with pytest.raises(ValueError, match=r"Replica 1 has code=2, and replica 0, which leads, has 1\. Start all"):
        running[1].result(30)


@pytest.mark.thorough
def test_a_coordinator_that_starts_again_counts_groups_from_the_first(
    run: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_SENDER_S", 1.0)
    monkeypatch.setattr(membership, "_SHRINK_S", 1.0)
    first, second = run.at_once(lambda: run.join(0), lambda: run.join(1))
    run.at_once(lambda: _step(first, 1.0), lambda: _step(second, 1.0))
    while True:
        run.start_again()
        asking = run.threads.submit(_step, first, 3.0)
        try:
            asking.result(1.0)
            break  # The coordinator had not heard of the second one when the first one asked.
        except TimeoutError:
            run.at_once(lambda: _step(second, 3.0), asking.result)
    assert first.members == (0,)

    def falls_behind() -> None:
        # Its first questions can fail, as the groups have the same number.
        with pytest.raises(BehindError):
            while True:
                _step(second, 2.0)
        second.close()

    behind = run.threads.submit(falls_behind)
    while not behind.done():
        assert _step(first, 2.0) == [2.0, 2.0]
    behind.result()


def test_a_coordinator_that_starts_again_waits_until_it_knows_the_replicas(run: Replicas) -> None:
    first, second = run.at_once(lambda: run.join(0), lambda: run.join(1))
    run.at_once(lambda: _step(first, 1.0), lambda: _step(second, 1.0))
    run.start_again()
    gathering = run.threads.submit(let_replicas_gather, run.server.address())
    time.sleep(0.5)  # Otherwise the first one may ask before that.
    asking = run.threads.submit(_step, first, 1.0)
    time.sleep(0.8)  # The second one asks later, and would not have been waited for.
    assert _step(second, 4.0) == [2.5, 2.5] == asking.result(30)
    gathering.result(30)


def test_a_replica_waits_as_long_as_it_must(run: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_REMINDER_S", 0.3)
    run.server.shutdown()
    run.start("127.0.0.1:0", smallest=2)
    first, second = run.at_once(lambda: run.join(0), lambda: run.join(1))
    run.at_once(lambda: _step(first, 1.0), lambda: _step(second, 1.0))
    second.close()
    waiting = run.threads.submit(_step, first, 1.0)
    time.sleep(2.5)
    assert not waiting.done() and first.is_waiting
    assert any(
        re.match(r"Replica 0 has waited for \d+ s until at least 1 of 2 replicas are there", text) for text in run.said
    )
    again = run.threads.submit(run.join, 1)
    second = again.result(30)
    assert run.threads.submit(_step, second, 3.0).result(30) == [2.0, 2.0] == waiting.result(30)


def test_a_replica_that_has_missed_a_step_must_join_again(run: Replicas) -> None:
    first, second = run.at_once(lambda: run.join(0), lambda: run.join(1))
    run.at_once(lambda: _step(first, 1.0), lambda: _step(second, 1.0))
    first._manager._step += 1  # As if only this replica had counted a reduction.
    with pytest.raises(BehindError, match="Replica 1 has missed a step"):
        run.at_once(second.begin_step, first.begin_step)


def test_a_coordinator_that_cannot_be_reached_is_named() -> None:
    options = MembershipOptions(0, 1, 2, "http://127.0.0.1:9", timedelta(seconds=1))
    with pytest.raises(ConnectionError, match=r"The coordinator at http://127\.0\.0\.1:9 cannot be reached"):
        Membership(options, CPU, {}, dict, print)


@pytest.mark.parametrize("text", ["2", "3:2", "0:2", "a:b", "2:3:4"])
def test_ranges_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"elastic='{text}': expected the smallest and the largest number"):
        ReplicaRange.parse(text)
    with pytest.raises(ValueError, match="expected the smallest"):
        DataParallelStrategy(elastic=text)


def test_one_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="one replica has no other"):
        HybridShardStrategy(elastic="1:1")


def test_strategies_without_replicas_have_no_such_argument() -> None:
    assert NDParallelStrategy(elastic="2:3").config.arguments["elastic"] == "2:3"
    with pytest.raises((TypeError, ValueError), match="elastic"):
        FullShardStrategy(elastic="2:3")


@pytest.mark.parametrize(
    ("sizes", "arguments", "message"),
    [
        ({"pp": 2}, {}, "replicas that leave and join are not supported with pipelines. Leave elastic out, or set pp_"),
        ({"tp": 2}, {}, "are not supported with tensor parallelism. Leave elastic out, or set tp_size=1"),
        ({"cp": 2}, {}, "are not supported with context parallelism"),
        ({"dp_shard": 2, "ep": 2}, {}, "distributed experts are not supported"),
        ({}, {"compression": "bf16"}, "and compression='bf16': gradients are reduced between replicas as they are"),
        ({}, {"sync": LocalSGD(4)}, "and sync='LocalSGD every 4 steps': replicas reduce their gradients in every step"),
        ({}, {"step_in_backward": True}, "and step_in_backward='True': gradients are reduced between replicas when"),
        ({}, {"offload": "optimizer"}, "and offload='optimizer': a replica that joins is given"),
        ({}, {"check_replicas_every_n_steps": 2}, "and check_replicas_every_n_steps='2': only the replicas of one job"),
    ],
)
def test_what_cannot_be_elastic(sizes: dict[str, int], arguments: dict[str, Any], message: str) -> None:
    options = options_from({"elastic": "2:3", **arguments})
    run = Run("nd_parallel", ParallelLayout(**sizes), "cpu", 2, "32-true", False, False)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        options.of(ElasticOptions).check(run, options)
    assert str(error.value).startswith("elastic='2:3' with strategy 'nd_parallel'")


def test_the_launcher_says_which_replica_a_process_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ELASTIC", "2:3"), ("REPLICA", "3")):
        monkeypatch.setenv(f"LIGHTNING_DIST_{name}", value)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:9")
    replicas = ReplicaRange.asked(None)
    assert replicas == (2, 3)
    with pytest.raises(ValueError, match=r"LIGHTNING_DIST_REPLICA='3' in the environment: expected .* from 0 to 2\."):
        replicas.own_index()
    monkeypatch.setenv("LIGHTNING_DIST_REPLICA", "2")
    assert replicas.own_index() == 2
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE")
    with pytest.raises(
        ValueError, match=r"elastic='2:3', but TORCHFT_LIGHTHOUSE is not set in the environment\. Start"
    ):
        replicas.own_index()


def test_manual_optimization_is_not_elastic() -> None:
    options = options_from({"elastic": "2:3"})
    run = Run("data_parallel", ParallelLayout(), "cpu", 1, "32-true", False, False)
    manual = Fit("Gan", False, 1, False, None, "", lambda names: [])
    with pytest.raises(ValueError, match="with automatic_optimization = False in Gan: replicas agree once in each"):
        options.of(ElasticOptions).check_fit(run, manual, options)


@pytest.mark.parametrize(
    ("replicas", "accumulated", "divisor"),
    [("2:3", 3, 2), ("1:3", 3, 2), ("2:4", 4, 3), ("1:2", 1, None), ("2:3", 2, None), ("2:2", 1, None)],
)
def test_a_batch_that_stays_the_same_must_be_divisible(replicas: str, accumulated: int, divisor: int | None) -> None:
    options = options_from({"elastic": replicas, "elastic_batch": "fixed"})
    run = Run("data_parallel", ParallelLayout(), "cpu", 1, "32-true", False, False)
    fit = Fit("Net", True, accumulated, False, None, "", lambda names: [])
    elastic = options.of(ElasticOptions)
    if divisor is None:
        elastic.check_fit(run, fit, options)
        smallest, largest = (int(number) for number in replicas.split(":"))
        for number in range(smallest, largest + 1):
            assert ReplicaRange(smallest, largest).num_batches(accumulated, number) * number == accumulated * largest
        return
    message = f"accumulate_grad_batches={accumulated}: the batches of a step cannot be divided among"
    with pytest.raises(ValueError, match=rf"{message} .* replicas\. Use a multiple of {divisor}, with batches"):
        elastic.check_fit(run, fit, options)


def test_a_schedule_of_accumulation_is_no_batch_that_stays_the_same() -> None:
    options = options_from({"elastic": "2:3", "elastic_batch": "fixed"})
    run = Run("data_parallel", ParallelLayout(), "cpu", 1, "32-true", False, False)
    with pytest.raises(ValueError, match="and a GradientAccumulationScheduler: both change accumulate_grad_batches"):
        options.of(ElasticOptions).check_fit(run, Fit("Net", True, 2, True, None, "", lambda names: []), options)


def test_the_batch_of_replicas_needs_replicas_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_DIST_ELASTIC", raising=False)
    options = options_from({"elastic_batch": "fixed"})
    run = Run("data_parallel", ParallelLayout(), "cpu", 1, "32-true", False, False)
    with pytest.raises(ValueError, match="elastic_batch='fixed' without elastic: no replica is ever away"):
        options.of(ElasticOptions).check(run, options)
    with pytest.raises(ValueError, match="elastic_batch='constant': expected 'scaled' or 'fixed'"):
        DataParallelStrategy(elastic="2:3", elastic_batch="constant")


def test_gradients_that_are_kept_are_predicted() -> None:
    size = RunSize(parameters=400, trainable=400, elements=100, state_bytes=8.0, num_shards=2)
    traits = options_from({"elastic": "2:3"}).of(ElasticOptions).memory_traits(CPU)
    assert predict(replace(size, **traits)).peak - predict(size).peak == 200
