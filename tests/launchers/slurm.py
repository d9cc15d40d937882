"""Submit jobs to a cluster of SLURM on this machine, and compare their training with one that nothing interrupts.

Run as ``python -m tests.launchers.slurm``, by root, with Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from tests.elastic import training as elastic
from tests.launchers.slurm_cluster import NODES, cluster, missing_programs, output, state_of
from tests.launchers.training import SECONDS, Scenario, check, configure, losses_of, run_scenarios, uninterrupted, until


def submit(folder: Path, configuration: Path, *options: str) -> str:
    """Submit a job of two nodes with one rank each, and return its number."""
    words = ["launch", "--on=slurm", "--nodes=2", "--devices=1", "--accelerator=cpu", f"--logs={folder / 'logs'}"]
    printed = output(
        sys.executable, "-m", "lightning_dist.cli", *words, *options, "--", "fit", "-c", str(configuration)
    )
    assert printed.startswith("Job "), printed
    return printed.split()[1]


def finish(job: str, folder: Path) -> None:
    """Wait until a job has ended.

    Raises:
        AssertionError: If it has failed.
    """
    until(lambda: state_of(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED"), SECONDS)
    assert state_of(job) == "COMPLETED", f"{state_of(job)}: {(folder / 'logs' / f'slurm_{job}.out').read_text()}"


def check_nodes(folder: Path, expected: dict[int, str], num_starts: int) -> str:
    """Compare the losses as :func:`check` does, and whether both nodes were used."""
    nodes = {losses_of(folder, rank)[0].node for rank in (0, 1)}
    assert nodes == set(NODES), f"the ranks ran on {nodes}"
    return check(folder, expected, num_starts)


def two_nodes(folder: Path, expected: dict[int, str]) -> str:
    """Train on two nodes."""
    finish(submit(folder, configure(folder)), folder)
    return check_nodes(folder, expected, 1)


def killed_rank(folder: Path, expected: dict[int, str]) -> str:
    """Kill a rank; the job is requeued and resumes."""
    job = submit(folder, configure(folder, kill_at=7), "--max-restarts=1")
    finish(job, folder)
    text = (folder / "logs" / f"slurm_{job}.out").read_text()
    assert "task 1: Killed" in text, text
    return check_nodes(folder, expected, 2)


def mistake(folder: Path, expected: dict[int, str]) -> str:
    """Give a wrong configuration; the job is not requeued, and its error is in the output of the job."""
    path = configure(folder)
    path.write_text(path.read_text().replace("full_shard", "full_shart"))
    job = submit(folder, path, "--max-restarts=3")
    until(lambda: state_of(job) == "FAILED", SECONDS)
    text = (folder / "logs" / f"slurm_{job}.out").read_text()
    assert "did you mean 'full_shard'" in text, text
    assert [path.name for path in (folder / "logs" / job).iterdir()] == ["attempt_0"]
    return "failed once, with its sentence"


def end_of_time(folder: Path, expected: dict[int, str]) -> str:
    """Let the job reach its time limit; it saves before, is requeued, and resumes."""
    job = submit(folder, configure(folder, seconds=4.0), "--sbatch=time=3")
    until(lambda: any(row.start for row in losses_of(folder, 0)), SECONDS)
    finish(job, folder)
    starts = len({row.start for row in losses_of(folder, 0)})
    return check_nodes(folder, expected, max(starts, 2))


def preempted(folder: Path, expected: dict[int, str]) -> str:
    """Submit a job of a higher priority; the first one saves, makes room, and resumes after it."""
    job = submit(folder, configure(folder, seconds=1.0), "--sbatch=partition=low")
    until(lambda: len(losses_of(folder, 0)) > 5, SECONDS)
    output("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wait", "--wrap=sleep 1")
    finish(job, folder)
    return check_nodes(folder, expected, 2)


_REPLICAS = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --no-kill --exclusive --output={folder}/job.out
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --no-kill --kill-on-bad-exit=0 bash -c "{python} -m lightning_dist.cli launch --devices 1 --elastic 1:2 \
  --max-restarts 9 --logs {folder}/logs --replicas \\$SLURM_NODEID --head $head -- fit -c {configuration}"
"""


def replicas(folder: Path, expected: dict[int, str]) -> str:
    """Train one replica on each node; lose a rank, which comes back, and then the node, without which training goes on.

    Args:
        folder: Folder of the scenario.
        expected: Losses of another training, which are not used.
    """
    configuration = elastic.configure(folder, "DataParallelStrategy", max_steps=1_000_000, seconds=0.1)
    script, written = folder / "job.sh", elastic.Rows(folder)
    script.write_text(_REPLICAS.format(folder=folder, python=sys.executable, configuration=configuration))
    job = output("sbatch", "--parsable", str(script))

    def together(since: float) -> bool:
        return {row.replica for row in written.read() if row.members == (0, 1) and row.at > since} == {0, 1}

    until(lambda: together(0.0), SECONDS)
    victim = next(row for row in reversed(written.read()) if row.replica == 1)
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: any(row.replica == 1 and row.pid != victim.pid for row in written.read()), SECONDS)
    back_at = time.time()
    until(lambda: together(back_at), SECONDS)
    output("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    down_at = time.time()
    until(lambda: sum(row.members == (0,) and row.at > down_at for row in written.read()) > 50, SECONDS)
    assert state_of(job) == "RUNNING", state_of(job)
    output("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    output("scancel", "--signal=TERM", job)
    until(lambda: state_of(job) != "RUNNING", SECONDS)
    rows = written.read()
    wrong = elastic.mistakes_in(rows, 2, 1)
    assert not wrong, "\n".join(wrong[:10])
    return f"{max(row.step for row in rows)} steps, the last ones without a node, equal one process"


SCENARIOS: tuple[Scenario, ...] = (
    two_nodes,
    killed_rank,
    replicas,
    mistake,
    preempted,
    end_of_time,
)


def main(names: list[str]) -> int:
    """Run the scenarios, print the result of each, and return 1 if one of them found a defect, otherwise 0."""
    missing = missing_programs()
    if missing or os.getuid():
        print(f"This needs root and {', '.join(missing)}: apt-get install slurm-wlm munge")
        return 2
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        expected = uninterrupted(folder / "uninterrupted")
        with cluster(folder / "cluster"):
            return run_scenarios(SCENARIOS, names, folder, expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
