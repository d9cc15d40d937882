"""Measure links between real processes, and find a slow one between two network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

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
from tests.launched import ROOT
from tests.pool import WorkerPool

pytestmark = pytest.mark.gloo


def measured(all_pairs: bool) -> tuple[list[Finding], list[LinkFigures]]:
    dist.init_process_group("gloo")
    examination = Examination(Ranks.connected(torch.device("cpu")), "gloo", all_pairs=all_pairs)
    return check_links(examination), examination.links


@pytest.mark.parametrize(("all_pairs", "num_between"), [(False, 1), (True, 4)])
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


def report() -> None:
    """Measure links, and print the findings and the bandwidth of the pair on rank 0."""
    findings, links = measured(False)
    if dist.get_rank() == 0:
        (pair,) = [link for link in links if link.operation == "point_to_point"]
        statuses = {finding.name: (finding.status, finding.seen) for finding in findings}
        print(json.dumps({"bytes_per_s": pair.bytes_per_s, "statuses": statuses}), flush=True)


def on_two_nodes(nodes: TwoNodes) -> dict[str, Any]:
    ranks = []
    for rank in range(2):
        environment = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": 29517}
        ranks.append(
            subprocess.Popen(
                [*nodes.command(rank), sys.executable, "-c", f"from {__name__} import report; report()"],
                env=os.environ | nodes.environment(rank) | {name: str(value) for name, value in environment.items()},
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
            )
        )
    output = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], output
    result: dict[str, Any] = json.loads(output[0])
    return result


@pytest.mark.alone
@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}")
def test_a_slow_link_between_nodes_is_found_and_a_fast_one_is_not() -> None:
    with TwoNodes.made() as nodes:
        fast = on_two_nodes(nodes)
        nodes.set_rate(0.1)
        slow = on_two_nodes(nodes)
    # The filter lets the first 256 KiB through at once, so that the link seems to be a little faster than its rate.
    assert 0.5 * 12.5e6 < slow["bytes_per_s"] < 1.5 * 12.5e6
    assert fast["bytes_per_s"] > 4 * slow["bytes_per_s"]
    assert "speed of adapters" not in fast["statuses"]
    status, seen = slow["statuses"]["speed of adapters"]
    assert status == "warn"
    assert "The slowest is 0-1" in seen
