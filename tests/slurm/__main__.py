"""Submit jobs to a cluster of SLURM on this machine, and compare their training with one that nothing interrupts.

Run as ``python -m tests.slurm``, by root, with Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from tests.slurm.cluster import NODES, cluster, missing_programs, output, state_of, until
from tests.slurm.jobs import losses_of

NUM_STEPS = 24
_SECONDS = 500.0
_CONFIGURATION = """\
seed_everything: 1
model:
  class_path: tests.slurm.jobs.Recorded
  init_args: {{folder: {folder}, kill_at: {kill_at}, seconds: {seconds}}}
trainer:
  accelerator: cpu
  strategy: full_shard
  max_epochs: 2
  logger: false
  default_root_dir: {folder}
  enable_progress_bar: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {folder}/checkpoints, every_n_train_steps: 2, save_top_k: -1}}
    - class_path: lightning_dist.FaultTolerance
"""


def configure(folder: Path, kill_at: int = -1, seconds: float = 0.0) -> Path:
    """Write the configuration of a training of :data:`NUM_STEPS` steps into an empty folder."""
    folder.mkdir()
    path = folder / "my.yaml"
    path.write_text(_CONFIGURATION.format(folder=folder, kill_at=kill_at, seconds=seconds))
    return path


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
    until(lambda: state_of(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED"), _SECONDS)
    assert state_of(job) == "COMPLETED", f"{state_of(job)}: {(folder / 'logs' / f'slurm_{job}.out').read_text()}"


def check(folder: Path, expected: dict[int, str], num_starts: int) -> str:
    """Compare the losses of rank 0 with those of a training that nothing has interrupted, bit by bit.

    Args:
        folder: Folder of the training.
        expected: The losses by step.
        num_starts: How often the job must have been started.

    Returns:
        A sentence on what was compared.
    """
    rows = losses_of(folder, 0)
    starts = sorted({attempt for attempt, *_ in rows})
    assert len(starts) == num_starts, f"the job was started {len(starts)} times, and not {num_starts}"
    assert {step for _, step, _, _ in rows} == set(expected), "not every step was computed"
    wrong = [(attempt, step) for attempt, step, loss, _ in rows if loss != expected[step]]
    assert not wrong, f"other losses in (start, step) {wrong}"
    nodes = {losses_of(folder, rank)[0][3] for rank in (0, 1)}
    assert nodes == set(NODES), f"the ranks ran on {nodes}"
    return f"{len(rows)} steps of {num_starts} starts, {len(rows) - len(expected)} of them twice, are bit-identical"


def uninterrupted(folder: Path) -> dict[int, str]:
    """Train with two ranks that ``launch`` starts without SLURM, and return the losses of rank 0 by step."""
    words = ["launch", "--devices=2", f"--logs={folder / 'logs'}", "--", "fit", "-c", str(configure(folder))]
    subprocess.run([sys.executable, "-m", "lightning_dist.cli", *words], check=True, capture_output=True)
    return {step: loss for _, step, loss, _ in losses_of(folder, 0)}


def two_nodes(folder: Path, expected: dict[int, str]) -> str:
    """Train on two nodes."""
    finish(submit(folder, configure(folder)), folder)
    return check(folder, expected, 1)


def killed_rank(folder: Path, expected: dict[int, str]) -> str:
    """Kill a rank; the job is requeued and resumes."""
    job = submit(folder, configure(folder, kill_at=7), "--max-restarts=1")
    finish(job, folder)
    text = (folder / "logs" / f"slurm_{job}.out").read_text()
    assert "task 1: Killed" in text, text
    return check(folder, expected, 2)


def mistake(folder: Path, expected: dict[int, str]) -> str:
    """Give a wrong configuration; the job is not requeued, and its error is in the output of the job."""
    path = configure(folder)
    path.write_text(path.read_text().replace("full_shard", "full_shart"))
    job = submit(folder, path, "--max-restarts=3")
    until(lambda: state_of(job) == "FAILED", _SECONDS)
    text = (folder / "logs" / f"slurm_{job}.out").read_text()
    assert "did you mean 'full_shard'" in text, text
    assert [path.name for path in (folder / "logs" / job).iterdir()] == ["attempt_0"]
    return "failed once, with its sentence"


def end_of_time(folder: Path, expected: dict[int, str]) -> str:
    """Let the job reach its time limit; it saves before, is requeued, and resumes."""
    job = submit(folder, configure(folder, seconds=4.0), "--sbatch=time=3")
    until(lambda: any(attempt for attempt, *_ in losses_of(folder, 0)), _SECONDS)
    finish(job, folder)
    starts = len({attempt for attempt, *_ in losses_of(folder, 0)})
    return check(folder, expected, max(starts, 2))


def preempted(folder: Path, expected: dict[int, str]) -> str:
    """Submit a job of a higher priority; the first one saves, makes room, and resumes after it."""
    job = submit(folder, configure(folder, seconds=1.0), "--sbatch=partition=low")
    until(lambda: len(losses_of(folder, 0)) > 5, _SECONDS)
    output("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wait", "--wrap=sleep 1")
    finish(job, folder)
    return check(folder, expected, 2)


SCENARIOS: tuple[Callable[[Path, dict[int, str]], str], ...] = (
    two_nodes,
    killed_rank,
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
    failed = 0
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        expected = uninterrupted(folder / "uninterrupted")
        assert len(expected) == NUM_STEPS
        with cluster(folder / "cluster"):
            for scenario in SCENARIOS:
                if names and scenario.__name__ not in names:
                    continue
                begin = time.monotonic()
                try:
                    result = scenario(folder / scenario.__name__, expected)
                except AssertionError as error:
                    failed += 1
                    result = f"FAILED: {error}"
                print(f"{scenario.__name__:<14} {result}  ({time.monotonic() - begin:.0f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
