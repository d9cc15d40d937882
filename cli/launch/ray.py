"""Run a launched job on a Ray cluster."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_dist.cli.errors import BAD_CONFIGURATION, TRAINING_FAILED, print_error
from lightning_dist.cli.launch.failure import USUAL
from lightning_dist.cli.launch.job import Job, Launcher
from lightning_dist.cli.launch.output import print_new
from lightning_dist.cli.launch.rank import FINAL, end_of

_SECONDS_BETWEEN_LOOKS = 0.2
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # It says in a warning what will change in Ray.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # By default, a failure is noticed up to 2 seconds later.
}


def start(job: Job, options: argparse.Namespace) -> int:
    """Run the job on a cluster, wait for its end, and return the exit code of the run."""
    if find_spec("ray") is None:
        print_error(
            "lightning-dist launch: --on=ray needs Ray, which is not installed: pip install 'lightning-dist[ray]'."
            " Every node of the cluster needs it."
        )
        return BAD_CONFIGURATION
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    import ray

    is_connected = ray.is_initialized()  # It is within a job of Ray, such as a trial of Ray Tune.
    try:
        if not is_connected:
            _connect(job)
        return _run(job, options.wait)
    except ConnectionError as error:
        print_error(f"lightning-dist launch: there is no Ray cluster at --head={job.head}: {error}")
        return BAD_CONFIGURATION
    finally:
        if not is_connected:
            ray.shutdown()


def _run(job: Job, wait_s: float) -> int:
    from ray.train import TrainingFailedError

    from lightning_dist.run.ray_nodes import Nodes, run_nodes, start_folders

    nodes = Nodes(job.min_nodes or job.num_nodes, job.num_nodes, job.num_devices, job.on_gpu)
    try:
        nodes.wait(wait_s)
    except ValueError as error:
        hint = " For a run on CPUs, give --accelerator cpu." if job.on_gpu else ""
        print_error(f"lightning-dist launch: --on=ray: {error}{hint}")
        return BAD_CONFIGURATION
    earlier = len(start_folders(job.logs))
    try:
        with _stopped_by_signals(job.logs / "stop"), _Output(job.logs, earlier):
            last = run_nodes(job.command_without_sizes(), nodes, job.logs, job.max_restarts, (0, *FINAL))
    except TrainingFailedError as error:
        starts = start_folders(job.logs)[earlier:]
        return _report(starts[-1], error) if starts else _report_ray(error)
    end = end_of(last)
    return _code_in(last / "node_0.code") if end is None else end.code


def _connect(job: Job) -> None:
    """Connect to the cluster of ``--head``, to that of this machine, or to a new one with room for the job.

    Raises:
        ConnectionError: If there is no cluster at ``--head``.
    """
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if job.head != "local":
        try:
            ray.init(address=job.head or "auto", **quiet)
            print(f"launch: the Ray cluster is {ray.get_runtime_context().gcs_address}", file=sys.stderr)
            return
        except ConnectionError:
            if job.head or os.environ.get("RAY_ADDRESS"):
                raise
    num_cpus = None if job.on_gpu else max(os.cpu_count() or 1, job.num_nodes * job.num_devices)
    ray.init(address="local", num_cpus=num_cpus, **quiet)
    print("launch: a Ray cluster was started on this machine for this run", file=sys.stderr)


@contextmanager
def _stopped_by_signals(stop: Path) -> Iterator[None]:
    """Let the ranks save a checkpoint and end when this process gets SIGTERM or SIGINT for the first time."""

    def on_signal(number: int, _: FrameType | None) -> None:
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("launch: stopping; the ranks save a checkpoint if they are configured to", file=sys.stderr)

    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Output:
    """Print what the launcher of the first node prints, which has the output of rank 0.

    Args:
        logs: Folder of the logs.
        first: Number of the first start whose output is printed.
    """

    def __init__(self, logs: Path, first: int) -> None:
        self._logs = logs
        self._start = first
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="output of rank 0", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _follow(self) -> None:
        read = {"out": 0, "err": 0}
        while True:
            is_last = self._has_ended.wait(_SECONDS_BETWEEN_LOOKS)
            next_exists = (self._logs / f"start_{self._start + 1}").is_dir()
            for ending, stream in (("out", sys.stdout), ("err", sys.stderr)):
                path = self._logs / f"start_{self._start}" / f"node_0.{ending}"
                read[ending] = print_new(path, read[ending], stream)
            if next_exists:
                self._start += 1
                read = {"out": 0, "err": 0}
            elif is_last:
                return


def _report(start: Path, error: Exception) -> int:
    """Print what the launcher of the node that failed first says, and return its exit code."""
    paths = sorted(start.glob("node_*.code"), key=lambda path: path.stat().st_mtime)
    codes = {path: _code_in(path) for path in paths}
    failed = [path for path in paths if codes[path]]
    if not failed:
        return _report_ray(error)
    first = next((path for path in failed if codes[path] not in USUAL), failed[0])
    if first.stem != "node_0":  # What the first node says is on the screen already.
        print(first.with_suffix(".err").read_text(errors="replace").rstrip(), file=sys.stderr)
    return codes[first]


def _code_in(path: Path) -> int:
    """Return an exit code from its file; that of a launcher which a signal has ended is 128 plus its number."""
    code = int(path.read_text())
    return code if code >= 0 else 128 - code


def _report_ray(error: Exception) -> int:
    print_error(f"lightning-dist launch: Ray has ended the run: {error}")
    return TRAINING_FAILED


def _describe(job: Job, options: argparse.Namespace) -> str:
    """Return the resources that Ray is asked for, and the command that each node runs."""
    kind = "GPU" if job.on_gpu else "CPU"
    wait = f", for which it waits {options.wait:g} s" if options.wait else ""
    words = [
        *("python", "-m", "lightning_dist.cli.launch.node", "--node=NODE", "--nodes=NODES"),
        *(f"--devices={job.num_devices}", "--head=FIRST_NODE:PORT", f"--logs={job.logs}/start_K"),
        *("--", *job.command_without_sizes()),
    ]
    return (
        f"# cluster: {job.head or 'that of this machine, or a new one for this run'}\n"
        f"# {job.nodes.replace(':', ' to ')} nodes with {{{kind!r}: {job.num_devices}}} each{wait}; at most"
        f" {job.max_restarts} restarts\n"
        f"# Each node runs:\n{shlex.join(words)}"
    )


def _mistake(job: Job, options: argparse.Namespace) -> str | None:
    return None


RAY = Launcher(start, _describe, _mistake, uses=("head", "accelerator", "wait"))
