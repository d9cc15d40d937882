"""Slow links are found in measured figures, and links are named as the system tells them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.link_times import fitted, pairs_of, ring_of
from lightning_dist.run.doctor.links import check_links, judge_pairs, judge_speed
from lightning_dist.run.doctor.network import adapters, gpu_links, interfaces
from lightning_dist.run.doctor.profile import LinkFigures
from lightning_dist.run.doctor.ranks import Ranks


def ranks(num_nodes: int) -> Ranks:
    hosts = tuple(f"host{node}" for node in range(num_nodes))
    return Ranks(0, torch.device("cpu"), tuple(range(num_nodes)), hosts)


def figures(speeds: dict[tuple[int, int], float]) -> list[LinkFigures]:
    return [LinkFigures("between_nodes", "point_to_point", pair, 1e-5, speed) for pair, speed in speeds.items()]


@pytest.mark.parametrize("all_pairs", [False, True])
@pytest.mark.parametrize("num_nodes", [3, 4, 5, 8])
def test_the_slow_rank_is_named_among_any_number_of_nodes(num_nodes: int, all_pairs: bool) -> None:
    slow = num_nodes - 1
    pairs = pairs_of(range(num_nodes)) if all_pairs else ring_of(range(num_nodes))
    speeds = {pair: 4e8 if slow in pair else 1e9 + 1e7 * sum(pair) for pair in pairs}
    (finding,) = judge_pairs(figures(speeds), ranks(num_nodes))
    assert (finding.name, finding.status) == ("slow between nodes", "warn")
    assert f"They are all pairs of rank {slow} (host{slow})" in finding.seen
    assert "400 MB/s" in finding.seen


def test_a_slow_pair_is_named_by_both_ranks() -> None:
    speeds = dict.fromkeys(pairs_of(range(4)), 1e9) | {(1, 3): 4.9e8}
    (finding,) = judge_pairs(figures(speeds), ranks(4))
    assert "The pairs 1-3 490 MB/s have less than half of the 1.0 GB/s" in finding.seen
    assert "The pairs are on rank 1, 3 (host1, host3)." in finding.seen


def test_pairs_of_similar_speed_are_no_finding() -> None:
    speeds = dict.fromkeys(pairs_of(range(4)), 1e9) | {(1, 3): 5.1e8}
    assert judge_pairs(figures(speeds), ranks(4)) == []
    assert judge_pairs(figures({(0, 1): 1.0}), ranks(2)) == []


def test_pairs_are_compared_with_those_of_their_kind() -> None:
    kinds = {pair: "NVLink" if pair in ((0, 1), (2, 3)) else "PCIe" for pair in ring_of(range(4))}
    speeds = {pair: 1e11 if kind == "NVLink" else 1e10 for pair, kind in kinds.items()}
    assert judge_pairs(figures(speeds), ranks(4), kinds) == []
    assert [finding.status for finding in judge_pairs(figures(speeds), ranks(4))] == ["warn"]
    (finding,) = judge_pairs(figures(speeds | {(2, 3): 1e10}), ranks(4), kinds)
    assert "The pairs 2-3 10.0 GB/s have less than half of the 100.0 GB/s" in finding.seen


def test_of_many_ranks_only_the_first_are_named() -> None:
    assert ranks(3).named([2, 0]) == "rank 0, 2 (host0, host2)"
    assert ranks(10).named(range(10)).startswith("rank 0, 1, 2, 3, 4, 5, 6, 7 and 2 more (host0, host1,")


@pytest.mark.parametrize(
    ("backend", "gigabits", "bytes_per_s", "part"),
    [
        ("gloo", 1, 3.0e7, "24.0%"),
        ("gloo", 1, 3.2e7, None),
        ("gloo", 100, 2.4e8, "19.2%"),  # One connection of gloo is expected to reach 10 Gbit/s at most.
        ("gloo", 100, 3.2e8, None),
        ("cpu:gloo,cuda:nccl", 100, 3.0e9, "24.0%"),
        ("cpu:gloo,cuda:nccl", 100, 3.2e9, None),
        ("gloo", None, 1.0, None),
    ],
)
def test_messages_are_compared_with_the_speed_of_the_adapter(
    backend: str, gigabits: float | None, bytes_per_s: float, part: str | None
) -> None:
    speeds = [None if gigabits is None else gigabits * 1e9] * 2
    found = judge_speed(figures({(0, 1): bytes_per_s}), ranks(2), speeds, backend)
    assert [finding.status for finding in found] == ([] if part is None else ["warn"])
    assert part is None or part in found[0].seen


@pytest.mark.parametrize(("num_ranks", "pairs"), [(1, []), (2, [(0, 1)]), (3, [(0, 1), (1, 2), (2, 0)])])
def test_a_ring_has_every_rank(num_ranks: int, pairs: list[tuple[int, int]]) -> None:
    assert ring_of(range(num_ranks)) == pairs


@pytest.mark.parametrize("bytes_per_s", [1e5, 1e7, 1e9, 1e10])
@pytest.mark.parametrize("alpha_s", [1e-6, 1e-4, 5e-3])
def test_latency_and_bandwidth_are_those_of_the_link(alpha_s: float, bytes_per_s: float) -> None:
    asked = []

    def seconds(num_bytes: int, repetitions: int) -> float:
        asked.append(num_bytes)
        return alpha_s + num_bytes / bytes_per_s

    alpha, seconds_per_byte = fitted(seconds, torch.device("cpu"))
    assert alpha == alpha_s + 1024 / bytes_per_s
    # The latency is that of a small message, and the largest one may take only some latencies.
    assert 1 / seconds_per_byte == pytest.approx(bytes_per_s, rel=0.1 if 2**24 / bytes_per_s > 2 * alpha_s else 0.7)
    assert max(asked) <= 2**24
    assert max(asked) / bytes_per_s < 5 * max(0.1, 10 * alpha)  # A slow link is not blocked for minutes.


def test_one_process_says_what_it_cannot_measure() -> None:
    (finding,) = check_links(Examination(Ranks(0, torch.device("cpu"), (0,), ("here",))))
    assert finding.status == "skip"
    assert "there is one process" in finding.seen
    assert "--devices" in finding.advice


TABLE = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tPIX\tSYS\tPXB\t0-31\t0
GPU1\tNV12\t X \tSYS\tPIX\tSYS\t0-31\t0
GPU2\tPIX\tSYS\t X \tNV12\tSYS\t32-63\t1
GPU3\tSYS\tPIX\tNV12\t X \tSYS\t32-63\t1
NIC0\tPXB\tSYS\tSYS\tSYS\t X
"""


def test_the_links_of_gpus_are_read_from_the_table_of_nvidia_smi() -> None:
    assert gpu_links(TABLE) == {
        "NVLink (NV12)": [(0, 1), (2, 3)],
        "PCIe, through one switch (PIX)": [(0, 2), (1, 3)],
        "PCIe, between CPU sockets (SYS)": [(0, 3), (1, 2)],
    }
    assert gpu_links("") == {}


def test_adapters_are_read_from_the_kernel(tmp_path: Path) -> None:
    files = {
        "net/lo/operstate": "unknown",
        "net/eth0/speed": "25000",
        "net/eth0/operstate": "up",
        "net/eth1/speed": "-1",
        "net/eth1/operstate": "down",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
        "infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "infiniband/mlx5_1/ports/1/rate": "100 Gb/sec (4X EDR)",
        "infiniband/mlx5_1/ports/1/link_layer": "Ethernet",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert list(map(str, interfaces(tmp_path))) == [
        "eth0 (Ethernet, 25 Gbit/s)",
        "eth1 (Ethernet, of unknown speed, without a connection)",
    ]
    assert list(map(str, adapters(tmp_path))) == [
        "mlx5_0:1 (InfiniBand, 400 Gbit/s)",
        "mlx5_1:1 (RoCE, 100 Gbit/s, without a connection)",
    ]
