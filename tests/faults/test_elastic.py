"""Test that a run whose node dies continues on the other nodes, with the same global batch size."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.faults import soak_rank
from tests.faults.soak import lives
from tests.launched import Forked

pytestmark = pytest.mark.alone

NUM_STEPS = 60


def agent(folder: Path, node: int, port: int) -> None:
    """Run torchrun's agent of a node, with one rank, which is forked and so need not import anything."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=1,
        run_id="elastic",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"last_call_timeout": 4, "keep_alive_interval": 1, "is_host": node == 0},
        max_restarts=3,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, soak_rank.train)(folder, NUM_STEPS)


@pytest.mark.thorough
def test_a_run_goes_on_without_a_node_that_died(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [Forked(agent, tmp_path, node, port, environment=dict(os.environ), is_parent=True) for node in range(2)]
    try:
        deadline = time.monotonic() + 60
        while not (second := lives(tmp_path, 1)) or len(second[-1].losses) < 12:
            if time.monotonic() > deadline or nodes[0].returncode is not None:
                nodes[0].kill()
                raise AssertionError(nodes[0].stdout.read()[-3000:])
            time.sleep(0.05)
        os.kill(second[-1].pid, signal.SIGKILL)
        nodes[1].kill()
        output, _ = nodes[0].communicate(timeout=120)
        assert nodes[0].returncode == 0, output[-3000:]
    finally:
        for node in nodes:
            node.kill()
    before, after = lives(tmp_path, 0)[0], lives(tmp_path, 0)[-1]
    assert 0 < after.start <= max(before.losses) and max(after.losses) == NUM_STEPS
    sizes = [
        line.split()[3] for line in (tmp_path / "rank0.txt").read_text().splitlines() if line.startswith("process")
    ]
    assert sizes == ["2", "1"]
