"""A node dies: training goes on with those that are left, at the same global batch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.soak import lives

NUM_STEPS = 60


def join(folder: Path, node: int, port: int) -> subprocess.Popen[bytes]:
    """A node: a torchrun of its own, with one process."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
            *(
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}",
                "--rdzv-id=elastic",
                "--monitor-interval=0.1",
            ),
            *("--rdzv-conf", f"last_call_timeout=4,keep_alive_interval=1,is_host={int(node == 0)}"),
            *("-m", "tests.faults.soak_rank", str(folder), str(NUM_STEPS)),
        ],
        stdout=open(folder / f"node{node}.txt", "wb"),
        stderr=subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def test_a_run_goes_on_without_a_node_that_died(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [join(tmp_path, 0, port)]
    time.sleep(1)
    nodes.append(join(tmp_path, 1, port))
    try:
        deadline = time.monotonic() + 60
        while not (second := lives(tmp_path, 1)) or len(second[-1].losses) < 12:
            assert time.monotonic() < deadline and nodes[0].poll() is None, (tmp_path / "node0.txt").read_text()[-3000:]
            time.sleep(0.05)
        os.kill(second[-1].pid, signal.SIGKILL)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        assert nodes[0].wait(timeout=120) == 0, (tmp_path / "node0.txt").read_text()[-3000:]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    before, after = lives(tmp_path, 0)[0], lives(tmp_path, 0)[-1]
    assert 0 < after.start <= max(before.losses) and max(after.losses) == NUM_STEPS
    sizes = [
        line.split()[3] for line in (tmp_path / "rank0.txt").read_text().splitlines() if line.startswith("process")
    ]
    assert sizes == ["2", "1"]
