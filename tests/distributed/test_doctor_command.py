"""The examination runs on several ranks, and a rank that dies, fails or hangs ends all of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_dist.cli import main
from lightning_dist.cli.doctor import ranks
from lightning_dist.cli.doctor.ranks import Request, Result, examine_as_rank
from lightning_dist.run.doctor.examination import Check, Examination
from lightning_dist.run.doctor.finding import Finding
from tests.launched import Forked
from tests.pool import RankFailed, WorkerPool
from tests.thorough import one_in

pytestmark = pytest.mark.gloo


def examined(folder: Path) -> Result | None:
    return examine_as_rank(Request("cpu", False, str(folder), "http://127.0.0.1:9"))


def test_all_checks_run_on_two_nodes(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(examined, 2, tmp_path, num_nodes=2)
    assert first.findings == second.findings
    statuses = {finding.name: finding.status for finding in first.findings}
    assert list(statuses) == [
        name
        for name in (
            "versions", "environment", "limits", "shared memory", "clocks", "links by name", "links between nodes",
            "speed of adapters", "devices", "slow devices", "free memory", "checkpoint folder", "MLflow",
            "data loading",
        )
        if name in statuses
    ]  # fmt: skip
    assert statuses.keys() >= {"versions", "clocks", "links between nodes", "devices", "checkpoint folder"}
    assert (statuses["versions"], statuses["MLflow"], statuses["data loading"]) == ("pass", "fail", "skip")
    assert (first.profile.num_nodes, len(first.profile.devices), len(first.profile.links)) == (2, 2, 5)
    assert {link.scope for link in first.profile.links} == {"between_nodes"}
    assert first.profile.why_other_machine(os.uname().nodename, first.profile.devices[1].name) is None


FAILED = 7


def broken(how: str) -> None:
    """Run two checks, in the first of which rank 1 breaks, and end this process as the command does."""

    def check(examination: Examination) -> list[Finding]:
        if dist.get_rank() == 1:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise OSError("the disk is broken")
            time.sleep(100)
        return []

    def together(examination: Examination) -> list[Finding]:
        examination.ranks.gather(None)
        return []

    ranks.CHECKS = (Check("breaking", check, lambda _: 1.0), Check("waiting", together))  # type: ignore[assignment]
    os._exit(FAILED if examined(Path()) is None else 0)


@pytest.mark.parametrize(("how", "code"), one_in(2, [("dies", -signal.SIGKILL), ("raises", FAILED), ("hangs", 1)]))
def test_a_broken_rank_ends_all_ranks(pool: WorkerPool, how: str, code: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        pool.run(broken, 2, how, grace_s=30.0)
    assert caught.value.errors == {
        0: f"the process died with exit code {FAILED}",
        1: f"the process died with exit code {code}",
    }
    assert time.monotonic() - start < 25


def run_command(*arguments: str) -> None:
    sys.exit(main(["doctor", *arguments]))


def test_a_rank_that_is_killed_ends_the_command(tmp_path: Path) -> None:
    process = Forked(
        run_command, "--devices=2", "--accelerator=cpu", f"--checkpoint-folder={tmp_path}",
        environment=dict(os.environ), is_parent=True,
    )  # fmt: skip
    started = ranks_of(process.pid)
    os.kill(started[1], signal.SIGKILL)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1, printed
    assert "error: rank 1 was ended by SIGKILL, which ends all ranks. It may be the kernel's out-of-memory" in printed
    assert not Path(f"/proc/{started[0]}").exists()
    assert "passed" not in printed


def ranks_of(pid: int) -> list[int]:
    """Return the processes of two ranks that a process has started, in the order of their starts."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        found = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        if len(found) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError("two ranks were not started")
