"""Run trainings on a cluster of Ray on this machine, and compare them with one that nothing interrupts.

Run as ``python -m tests.launchers.ray``.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=os.getcwd())
os.environ.update({"RAY_worker_niceness": "0"})  # By default it is 15, so that workers wait for everything else.

import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lightning_dist.plugins.callbacks import ReportToRay
from lightning_dist.plugins.ray import as_rank, devices_and_nodes
from tests.launchers.training import (
    SECONDS,
    Row,
    Scenario,
    check,
    configure,
    fit,
    losses_of,
    run_scenarios,
    uninterrupted,
    until,
)


@contextmanager
def cluster(*nodes: int) -> Iterator[Cluster]:
    """Run a cluster in this context, whose nodes are all this machine.

    Args:
        nodes: Number of CPUs of each node.
    """
    head, *others = nodes
    running = Cluster(initialize_head=True, head_node_args={"num_cpus": head, "include_dashboard": False})
    try:
        for num_cpus in others:
            running.add_node(num_cpus=num_cpus)
        yield running
    finally:
        running.shutdown()


def launch(address: str, folder: Path, configuration: Path, *options: str) -> subprocess.Popen[str]:
    """Launch a training on the cluster at ``address``, and return the running command."""
    words = ["launch", "--on=ray", f"--head={address}", f"--logs={folder / 'logs'}", "--accelerator=cpu", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_dist.cli", *words, "--", "fit", "-c", str(configuration)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(command: subprocess.Popen[str], code: int = 0) -> str:
    """Wait until a command has ended, and return what it has printed.

    Raises:
        AssertionError: If it ends with another exit code than ``code``.
    """
    text, _ = command.communicate(timeout=SECONDS)
    assert command.returncode == code, f"exit code {command.returncode}, and not {code}: {text}"
    return text


def gap(rows: list[Row], before: float) -> tuple[Row, float]:
    """Return the first step after a time, and how many seconds after it the step was computed."""
    row = next(row for row in rows if row.seconds > before and row.start > 0)
    return row, row.seconds - before


def two_nodes(folder: Path, expected: dict[int, str]) -> str:
    """Train on two nodes."""
    with cluster(1, 1) as nodes:
        finish(launch(nodes.address, folder, configure(folder), "--nodes=2", "--devices=1"))
    return check(folder, expected, 1)


def killed_rank(folder: Path, expected: dict[int, str]) -> str:
    """Kill a rank; the run starts again and resumes. On the same cluster, refuse a run that it has no room for."""
    with cluster(2) as nodes:
        configuration = configure(folder, kill_at=7)
        too_large = finish(launch(nodes.address, folder, configuration, "--nodes=2", "--devices=2"), 2)
        assert "the run needs 2 x 2 CPUs, and the Ray cluster has room for 1 x 2: 2 CPUs on 1 node." in too_large
        finish(launch(nodes.address, folder, configuration, "--devices=2", "--max-restarts=1"))
    rows = losses_of(folder, 0)
    killed = max(row.seconds for row in rows if row.start == 0)
    return f"{check(folder, expected, 2)}; next step after {gap(rows, killed)[1]:.1f} s"


def failed_rank(folder: Path, expected: dict[int, str]) -> str:
    """Kill a rank of a run that may not start again; the command says which."""
    with cluster(1, 1) as nodes:
        text = finish(launch(nodes.address, folder, configure(folder, kill_at=3), "--nodes=2", "--devices=1"), 137)
    assert "rank 1 was ended by signal 9 (SIGKILL)" in text, text
    return "the command ended with 137 and named rank 1"


def mistake(folder: Path, expected: dict[int, str]) -> str:
    """Give a wrong configuration; the run does not start again."""
    path = configure(folder)
    path.write_text(path.read_text().replace("full_shard", "full_shart"))
    with cluster(2) as nodes:
        text = finish(launch(nodes.address, folder, path, "--devices=2", "--max-restarts=3"), 2)
    assert "did you mean 'full_shard'" in text, text
    assert len(list((folder / "logs").glob("start_*"))) == 1
    return "failed once, with its sentence"


def stopped(folder: Path, expected: dict[int, str]) -> str:
    """Send SIGTERM to the command; the run saves, and resumes when it is launched again."""
    with cluster(2) as nodes:
        configuration = configure(folder, seconds=0.5)
        command = launch(nodes.address, folder, configuration, "--devices=2", "--max-restarts=1")
        until(lambda: len(losses_of(folder, 0)) > 5)
        command.send_signal(signal.SIGTERM)
        finish(command, 75)
        finish(launch(nodes.address, folder, configuration, "--devices=2", "--max-restarts=1"))
    return check(folder, expected, 2)


def grown_and_lost(folder: Path, expected: dict[int, str]) -> str:
    """Add a node to a run of one, and take it away again; the global batch stays."""
    with cluster(1) as nodes:
        configuration = configure(folder, seconds=1.0)
        command = launch(nodes.address, folder, configuration, "--nodes=1:2", "--devices=1", "--max-restarts=3")
        until(lambda: len(losses_of(folder, 0)) > 3)
        added = nodes.add_node(num_cpus=1)
        at = losses_of(folder, 0)[-1].seconds
        until(lambda: bool(losses_of(folder, 1)))
        row, grown = gap(losses_of(folder, 0), at)
        assert row.start == 1
        until(lambda: len(losses_of(folder, 1)) > 3)
        nodes.remove_node(added, allow_graceful=False)
        at = losses_of(folder, 0)[-1].seconds
        until(lambda: losses_of(folder, 0)[-1].start == 2)
        lost = losses_of(folder, 0)[-1].seconds - at
        finish(command)
    rows = losses_of(folder, 0)
    batches = {row.global_batch for row in rows}
    assert len(batches) == 1, f"global batches of {batches}"
    assert sorted({row.step for row in rows}) == list(range(len({row.step for row in rows})))
    return f"grown after {grown:.1f} s, a lost node after {lost:.1f} s; all global batches have {batches} samples"


def train(config: dict[str, str]) -> None:
    """Train the module of the scenarios in a worker of Ray."""
    fit(Path(config["folder"]), [ReportToRay()], **devices_and_nodes())


def train_function(folder: Path, expected: dict[int, str]) -> str:
    """Let Ray's own workers run a function that trains."""
    folder.mkdir()
    with cluster(1, 1) as nodes:
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            result = TorchTrainer(
                as_rank(train),
                train_loop_config={"folder": str(folder)},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(name="train", storage_path=str(folder / "ray")),
            ).fit()
        finally:
            ray.shutdown()
    assert result.metrics is not None and result.checkpoint is not None, "no checkpoint was reported"
    assert (result.metrics["step"], result.metrics["epoch"]) == (len(expected), 1), result.metrics
    with result.checkpoint.as_directory() as reported:
        path = Path(json.loads(Path(reported, "pointer_ckpt.json").read_text())["uri"])
    assert path.parent == folder / "checkpoints" and path.exists(), path
    return check(folder, expected, 1)


SCENARIOS: tuple[Scenario, ...] = (
    two_nodes,
    killed_rank,
    failed_rank,
    mistake,
    stopped,
    grown_and_lost,
    train_function,
)


def main(names: list[str]) -> int:
    """Run the scenarios, print the result of each, and return 1 if one of them found a defect, otherwise 0.

    Args:
        names: Names of the scenarios; none: all. A JSON file before them has the losses that are expected by step.
    """
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        folder = Path(name)
        if names and names[0].endswith(".json"):
            expected = {int(step): loss for step, loss in json.loads(Path(names.pop(0)).read_text()).items()}
        else:
            expected = uninterrupted(folder / "uninterrupted")
        return run_scenarios(SCENARIOS, names, folder, expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
