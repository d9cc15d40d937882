"""Run trainings on the nodes of a Ray cluster, which starts them again after a failure.

Each node gets one worker of Ray Train (https://docs.ray.io/en/latest/train/train.html), which runs the module
``lightning_dist.cli.launch.node`` for the ranks of the node: signals, output and exit codes are those of every other
launcher.

This module imports neither torch nor Lightning, so that the workers start soon.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

__all__ = ["Nodes", "run_nodes", "start_folders"]

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_SIZES = 2.0
"""How often Ray looks whether the run could use more nodes."""

_SECONDS_BETWEEN_NODES = 1.0
"""How often this process looks whether nodes were added."""


@dataclass(frozen=True)
class Nodes:
    """Describe the nodes of a Ray cluster that a run needs.

    Args:
        smallest: The smallest number of nodes that the run may continue with.
        largest: The number of nodes that it uses if there are so many.
        num_devices: Number of devices, and of ranks, of each node.
        on_gpu: Whether the devices are GPUs; otherwise each rank gets a CPU core.
    """

    smallest: int
    largest: int
    num_devices: int
    on_gpu: bool

    @property
    def kind(self) -> str:
        """Return Ray's name of what a device is."""
        return "GPU" if self.on_gpu else "CPU"

    def num_there(self) -> int:
        """Return how many nodes of this size the cluster has room for, whether or not others use them now."""
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return sum(int(resources.get(self.kind, 0)) // self.num_devices for resources in alive)

    def wait(self, seconds: float) -> None:
        """Wait until the cluster has room for the run, and ask a cluster that can grow for it.

        Args:
            seconds: How long to wait.

        Raises:
            ValueError: If there is no room after that time.
        """
        end = time.monotonic() + seconds
        while (there := self.num_there()) < self.smallest:
            if time.monotonic() >= end:
                total = int(ray.cluster_resources().get(self.kind, 0))
                nodes = f"{len(_alive())} node{'s' * (len(_alive()) != 1)}"
                raise ValueError(
                    f"the run needs {self.smallest} x {self.num_devices} {self.kind}s, and the Ray cluster has room for"
                    f" {there} x {self.num_devices}: {total} {self.kind}s on {nodes}. Add nodes that have"
                    f" {self.num_devices} {self.kind}s each, wait for them, or ask for fewer."
                )
            from ray.autoscaler.sdk import request_resources  # It needs a connection to a cluster.

            request_resources(bundles=[{self.kind: self.num_devices}] * self.smallest)
            time.sleep(min(_SECONDS_BETWEEN_SIZES, max(end - time.monotonic(), 0.0)))


def run_nodes(
    words: Sequence[str], nodes: Nodes, logs: Path, max_restarts: int = 0, final: Collection[int] = (0,)
) -> Path:
    """Run a command of ``lightning-dist``, or a script, on nodes of the Ray cluster that this process is connected to.

    Each start of the run has a folder ``start_K`` in the folder of the logs. It has the output of the ranks in
    ``attempt_0/rank_R.out`` and ``.err``, what the launcher of each node says in ``node_N.out`` and ``.err``, and its
    exit code in ``node_N.code``. A file ``stop`` in the folder of the logs lets the run save a checkpoint and end, as
    SIGTERM does elsewhere.

    Args:
        words: The command or the script, and its arguments, without the numbers of devices and nodes.
        nodes: The nodes. If their number may vary, the run restarts whenever it changes.
        logs: Folder of the logs, which all nodes must share.
        max_restarts: How often the run starts again after a failure.
        final: Exit codes after which it does not start again.

    Returns:
        The folder of the last start.

    Raises:
        ray.train.TrainingFailedError: If a node has failed more often than ``max_restarts``.
    """
    logs.mkdir(parents=True, exist_ok=True)
    is_fixed = nodes.smallest == nodes.largest
    trainer = DataParallelTrainer(
        _run_node,
        train_loop_config={
            "words": list(words),
            "num_devices": nodes.num_devices,
            "logs": str(logs),
            "final": list(final),
            "folder": os.getcwd(),
            "num_threads": os.environ.get("OMP_NUM_THREADS", "" if nodes.on_gpu else "1"),
            "path": [path for path in sys.path if path],
        },
        scaling_config=ScalingConfig(
            num_workers=nodes.largest if is_fixed else (nodes.smallest, nodes.largest),
            use_gpu=nodes.on_gpu,
            resources_per_worker={nodes.kind: nodes.num_devices},
            elastic_resize_monitor_interval_s=_SECONDS_BETWEEN_SIZES,
        ),
        run_config=RunConfig(
            name="ray", storage_path=str(logs), failure_config=FailureConfig(max_failures=max_restarts)
        ),
    )
    try:
        with nullcontext() if is_fixed else _noticing_nodes():
            trainer.fit()
    finally:
        (logs / "stop").unlink(missing_ok=True)
    return start_folders(logs)[-1]


@contextmanager
def _noticing_nodes() -> Iterator[None]:
    """Let Ray notice at once in this context that nodes were added, for which it looks every 20 seconds by itself."""
    has_ended = threading.Event()
    thread = threading.Thread(target=_notice_nodes, args=(has_ended,), name="nodes of the cluster", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _notice_nodes(has_ended: threading.Event) -> None:
    known: set[str] = set()
    while not has_ended.wait(_SECONDS_BETWEEN_NODES):
        with suppress(Exception):  # The cluster may be going away. Other versions of Ray still look by themselves.
            alive = _alive()
            if known and alive - known:
                coordinator = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
                ray.get(coordinator.get_reserved_resources.remote("", recompute=True), timeout=5)
            known = alive


def start_folders(logs: Path) -> list[Path]:
    """Return the folders of the starts of a run, the last one last."""
    return sorted(logs.glob("start_*"), key=lambda path: int(path.name.removeprefix("start_")))


def _run_node(config: dict[str, Any]) -> None:
    """Run the ranks of a node in a worker of Ray, until they have ended.

    Raises:
        RuntimeError: If they fail, or if this node does not see a folder of the run.
    """
    context = ray.train.get_context()
    node, num_nodes = context.get_world_rank(), context.get_world_size()
    logs = Path(config["logs"])
    head, start = broadcast_from_rank_zero((_free_address(), _make_start(logs)) if node == 0 else None)
    here = ray.util.get_node_ip_address()
    for folder, name in ((logs / start, "of the logs"), (Path(config["folder"]), "in which the run was started")):
        if not folder.is_dir():
            raise RuntimeError(
                f"the node {here} does not see the folder {name}, {folder}. All nodes of a run on Ray must share it."
            )
    command = ["-m", "lightning_dist.cli.launch.node", f"--node={node}", f"--nodes={num_nodes}"]
    command += [f"--devices={config['num_devices']}", f"--head={head}", f"--logs={logs / start}", "--"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(config["path"])}
    environment["OMP_NUM_THREADS"] = config["num_threads"]  # Ray has set it to the number of CPUs of the whole node.
    if not config["num_threads"]:
        del environment["OMP_NUM_THREADS"]
    out, err = (logs / start / f"node_{node}.{ending}" for ending in ("out", "err"))
    with out.open("w") as output, err.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command, *config["words"]],
            cwd=config["folder"],
            env=environment,
            stdout=output,
            stderr=errors,
            preexec_fn=_end_with_parent,
        )
        code, was_stopped = _wait(process, logs / "stop")
    (logs / start / f"node_{node}.code").write_text(str(code))
    if code not in config["final"] and not was_stopped:
        raise RuntimeError(f"node {node} ({here}) ended with exit code {code}: see {err}")


def _wait(process: subprocess.Popen[bytes], stop: Path) -> tuple[int, bool]:
    """Wait for the end of a process, and return its exit code and whether it was asked to stop by the file ``stop``."""
    is_asked = False
    while (code := process.poll()) is None:
        if not is_asked and stop.exists():
            process.terminate()
            is_asked = True
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return code, is_asked


def _make_start(logs: Path) -> str:
    earlier = start_folders(logs)
    name = f"start_{int(earlier[-1].name.removeprefix('start_')) + 1 if earlier else 0}"
    (logs / name).mkdir()
    return name


def _free_address() -> str:
    host = ray.util.get_node_ip_address()
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"[{host}]:{listener.getsockname()[1]}" if ":" in host else f"{host}:{listener.getsockname()[1]}"


def _end_with_parent() -> None:
    """Let the kernel end this process when the thread that has started it ends, because Ray has ended its process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _alive() -> set[str]:
    """Return the names of the nodes of the cluster that are alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
