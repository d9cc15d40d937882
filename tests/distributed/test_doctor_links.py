"""Measure links between real processes, and find a slow one between two network namespaces."""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest
import torch
import torch.distributed as dist

from lightning_dist.run.doctor.examination import Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.link_times import COLLECTIVES
from lightning_dist.run.doctor.links import check_links
from lightning_dist.run.doctor.profile import LinkFigures
from lightning_dist.run.doctor.ranks import Ranks
from tests.bench.nodes import TwoNodes, why_not
from tests.pool import WorkerPool
from tests.thorough import one_in

pytestmark = pytest.mark.gloo


def measured(all_pairs: bool) -> tuple[list[Finding], list[LinkFigures]]:
    dist.init_process_group("gloo")
    examination = Examination(Ranks.connected(torch.device("cpu")), "gloo", all_pairs=all_pairs)
    return check_links(examination), examination.links


@pytest.mark.parametrize(("all_pairs", "num_between"), one_in(2, [(False, 1), (True, 4)]))
def test_collectives_and_pairs_are_measured_by_scope(pool: WorkerPool, all_pairs: bool, num_between: int) -> None:
    of_ranks = pool.run(measured, 4, all_pairs, num_nodes=2)
    assert all(other == of_ranks[0] for other in of_ranks[1:])
    findings, links = of_ranks[0]
    assert {finding.name for finding in findings} >= {"links inside a node", "links between nodes"}
    for operation in COLLECTIVES:
        assert [(link.scope, link.ranks) for link in links if link.operation == operation] == [
            ("node", (0, 1)), ("between_nodes", (0, 2)), ("node", (2, 3)),
        ]  # fmt: skip
    pairs = [link for link in links if link.operation == "point_to_point"]
    assert sorted(link.ranks for link in pairs if link.scope == "node") == [(0, 1), (2, 3)]
    between = sorted(link.ranks for link in pairs if link.scope == "between_nodes")
    assert between == ([(0, 2), (0, 3), (1, 2), (1, 3)] if all_pairs else [(0, 2)])
    assert len(between) == num_between
    for link in links:  # Nothing is faster than memory, nor slower than a bad network.
        assert 1e-6 < link.alpha_s < 1, link
        assert 1e6 < link.bytes_per_s < 1e11, link


def measured_on(nodes: TwoNodes) -> tuple[list[Finding], list[LinkFigures]]:
    """Measure links after this process has moved into the namespace of its node, as `ip netns exec` does it."""
    rank = int(os.environ["RANK"])
    name = nodes.command(rank)[-1]
    c = ctypes.CDLL(None)
    with open(f"/var/run/netns/{name}") as namespace:
        assert c.setns(namespace.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    assert c.unshare(0x00020000) == 0  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    subprocess.run(["umount", "--lazy", "/sys"], check=True)
    subprocess.run(["mount", "-t", "sysfs", name, "/sys"], check=True)
    os.environ.update(nodes.environment(rank))
    return measured(False)


@pytest.mark.alone
@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}")
def test_a_slow_link_between_nodes_is_found_and_a_fast_one_is_not(own_pool: WorkerPool) -> None:
    with TwoNodes.made() as nodes:
        results = {}
        for gigabits in (None, 1.0):
            nodes.set_rate(gigabits)
            findings, links = own_pool.run(measured_on, 2, nodes, num_nodes=2)[0]
            (pair,) = (link for link in links if link.operation == "point_to_point")
            if gigabits is not None:  # No rank can send more than the link takes, so that the bytes are counted right.
                assert len(links) == len(COLLECTIVES) + 1
                assert [link for link in links if not 0.2 * 125e6 < link.bytes_per_s < 1.1 * 125e6] == []
            results[gigabits] = pair.bytes_per_s, [item for item in findings if item.name == "speed of adapters"]
    (fast, in_fast), (slow, in_slow) = results.values()
    assert 0.5 * 125e6 < slow < 1.1 * 125e6
    assert fast > 2 * slow
    assert in_fast == []  # The kernel says that such a link has 10 Gbit/s, of which a quarter is enough.
    assert [finding.status for finding in in_slow] == ["warn"]
    assert "The slowest is 0-1 on rank 0, 1" in in_slow[0].seen
    assert "of what can be expected of an adapter with 10 Gbit/s" in in_slow[0].seen
