"""Start the ranks of this node by torch's elastic agent, as torchrun does."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shlex
import socket
import sys
from pathlib import Path

import psutil

from lightning_dist.cli.errors import BAD_CONFIGURATION, TRAINING_FAILED, print_error
from lightning_dist.cli.launch.elastic import ElasticLaunch
from lightning_dist.cli.launch.elastic import describe as describe_elastic
from lightning_dist.cli.launch.elastic import mistake as mistake_of_elastic
from lightning_dist.cli.launch.failure import Failure, attempt_folder, first_error
from lightning_dist.cli.launch.job import Job, Launcher, endpoint_of, mistake_of_head, python_words
from lightning_dist.cli.launch.rank import FOLDER, STOPPED, end_of

DEFAULT_PORT = 29400
_SECONDS_TO_STOP = 300
"""Time that ranks have to save a checkpoint after a signal, before they are killed."""


def describe(job: Job, _: argparse.Namespace) -> str:
    """Return the torchrun command that starts the same processes on this node."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={_endpoint(job)}"] if job.head else ["--standalone"]
    words = [
        "torchrun",
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.num_devices}",
        f"--max-restarts={job.max_restarts}",
        "--rdzv-id=launch",
        *rendezvous,
        f"--log-dir={job.logs}",
        "--redirects=3",
        *python_words(job),
    ]
    return f"{FOLDER}={shlex.quote(str(job.logs))} {shlex.join(words)}"


def start(job: Job, _: argparse.Namespace) -> int:
    """Start the ranks of this node, wait for their end, and return the exit code of the run.

    Args:
        job: The run, which the other nodes start with the same sizes.
    """
    # These imports take seconds, which a mistake on the command line need not wait for.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from lightning_dist.cli.launch.rank_logs import RankLogs

    # The agent logs how each process has ended, which is said below in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    job.logs.mkdir(parents=True, exist_ok=True)
    (job.logs / "end").unlink(missing_ok=True)
    os.environ[FOLDER] = str(job.logs)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // job.num_devices, 1)))
    logs = RankLogs(job.logs)
    config = LaunchConfig(
        min_nodes=job.min_nodes or job.num_nodes,
        max_nodes=job.num_nodes,
        nproc_per_node=job.num_devices,
        run_id="launch",
        rdzv_backend="c10d",
        rdzv_endpoint=_endpoint(job),
        rdzv_configs={"is_host": False} if job.head else {},
        max_restarts=job.max_restarts,
        logs_specs=logs,
        shutdown_timeout=_SECONDS_TO_STOP,
    )
    store = _store_of(job.head) if job.head else None
    try:
        elastic_launch(config, sys.executable)(*python_words(job))
    except ChildFailedError as error:
        logs.stop()
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        return report(job.logs, logs.attempt, [Failure(rank, failure.exitcode) for rank, failure in failures])
    except SignalException as error:
        logs.stop()
        return _code_of(job.logs, 128 + error.sigval)
    except RendezvousError as error:
        if (end := end_of(job.logs)) is not None:  # The node of the head has ended first, because the run has.
            return end.code
        print_error(
            f"lightning-dist launch: the {job.nodes} nodes did not meet at {_endpoint(job)}: {error}. Start the"
            " command on each of them, with the same --head, which must be one of the nodes."
        )
        return TRAINING_FAILED
    finally:
        logs.stop()
        del store
    return _code_of(job.logs, 0)


def report(folder: Path, attempt: Path, failures: list[Failure]) -> int:
    """Print the error of the rank that failed first, and return the exit code of the run.

    Args:
        folder: Folder of the logs.
        attempt: Folder of the output of the ranks that were started last.
        failures: Ranks of this node that failed at the last start, in the order in which they did.
    """
    end = end_of(folder)
    if end is not None and end.code == STOPPED:
        return end.code
    if end is not None:
        attempt, failures = attempt_folder(folder, end.attempt), [Failure(end.rank, end.code)]
    first, text = first_error(attempt, failures)
    if first.rank and text:  # What rank 0 has written is on the screen already.
        print(text, file=sys.stderr)
    files = attempt / f"rank_{first.rank}.err"
    print_error(f"{first.how()}. Its output is in {files}, and that of the other ranks beside it.", prefix="launch: ")
    return first.code if first.code > 0 else 128 - first.code


def _code_of(folder: Path, otherwise: int) -> int:
    end = end_of(folder)
    return otherwise if end is None else end.code


def _endpoint(job: Job) -> str:
    if not job.head:
        return "localhost:0"
    return endpoint_of(job.head, DEFAULT_PORT)


def _store_of(head: str) -> object | None:
    """Return the store at which the nodes meet, if ``head`` is this machine, and no other process has begun it.

    Torch makes it as well, but only if the host name of the machine has the address ``head``.
    """
    from torch.distributed import TCPStore

    host, _, port = endpoint_of(head, DEFAULT_PORT).rpartition(":")
    host = host.strip("[]")
    if not _is_here(host):
        return None
    try:
        return TCPStore(host, int(port), is_master=True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError:
        return None


def _is_here(host: str) -> bool:
    """Return whether a name or an address is one of this machine."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return not found.isdisjoint(one.address for each in psutil.net_if_addrs().values() for one in each)


def _start_local(job: Job, options: argparse.Namespace) -> int:
    if job.elastic is None:
        return start(job, options)
    if importlib.util.find_spec("torchft") is None:
        print_error(
            "lightning-dist launch: --elastic needs torchft, which is not installed: pip install"
            " 'lightning-dist[elastic]'."
        )
        return BAD_CONFIGURATION
    return ElasticLaunch(job, job.elastic, options.heartbeat or 1.0, options.replicas).run()


def _describe_local(job: Job, options: argparse.Namespace) -> str:
    if job.elastic is None:
        return describe(job, options)
    return describe_elastic(job, job.elastic, options.heartbeat or 1.0, options.replicas)


def _mistake_of_local(job: Job, options: argparse.Namespace) -> str | None:
    if job.elastic is not None and (mistake := mistake_of_elastic(job, job.elastic, options.replicas)) is not None:
        return mistake
    if job.elastic is None and (job.head or options.replicas):
        if job.head:
            return f"--head={job.head}: --on=local uses it with --elastic only. Give --on torchrun, or leave it out."
        return "--replicas without --elastic: give --elastic MIN:MAX as well, or leave it out."
    if job.num_nodes > 1:
        return (
            f"--nodes={job.nodes}, but --on=local starts the processes of this node alone. Give --on torchrun"
            " --head HOST and start the command on each node, --on slurm, or --on ray."
        )
    return None


def _mistake_of_torchrun(job: Job, options: argparse.Namespace) -> str | None:
    if job.num_nodes > 1 and not job.head:
        return f"--nodes={job.nodes} needs --head HOST, the name or address of one of the nodes, on each node."
    return mistake_of_head(job)


LOCAL = Launcher(_start_local, _describe_local, _mistake_of_local, uses=("elastic", "heartbeat", "head", "replicas"))
TORCHRUN = Launcher(start, describe, _mistake_of_torchrun, uses=("head",))
