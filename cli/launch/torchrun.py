"""Start the ranks of this node by torch's elastic agent, as torchrun does."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from pathlib import Path

from lightning_dist.cli.errors import TRAINING_FAILED, print_error
from lightning_dist.cli.launch.failure import Failure, attempt_folder, first_error
from lightning_dist.cli.launch.job import Job, python_words
from lightning_dist.cli.launch.rank import FOLDER, STOPPED, end_of

DEFAULT_PORT = 29400
_SECONDS_TO_STOP = 300
"""Time that ranks have to save a checkpoint after a signal, before they are killed."""


def describe(job: Job) -> str:
    """Return the torchrun command that starts the same processes on this node."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={_endpoint(job)}"] if job.head else ["--standalone"]
    words = [
        "torchrun",
        f"--nnodes={job.num_nodes}",
        f"--nproc-per-node={job.num_devices}",
        f"--max-restarts={job.max_restarts}",
        "--rdzv-id=launch",
        *rendezvous,
        f"--log-dir={job.logs}",
        "--redirects=3",
        *python_words(job),
    ]
    return f"{FOLDER}={shlex.quote(str(job.logs))} {shlex.join(words)}"


def start(job: Job) -> int:
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
        min_nodes=job.num_nodes,
        max_nodes=job.num_nodes,
        nproc_per_node=job.num_devices,
        run_id="launch",
        rdzv_backend="c10d",
        rdzv_endpoint=_endpoint(job),
        max_restarts=job.max_restarts,
        logs_specs=logs,
        shutdown_timeout=_SECONDS_TO_STOP,
    )
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
        print_error(
            f"lightning-dist launch: the {job.num_nodes} nodes did not meet at {_endpoint(job)}: {error}. Start the"
            " command on each of them, with the same --head, which must be one of the nodes."
        )
        return TRAINING_FAILED
    finally:
        logs.stop()
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
    return job.head if re.search(r":\d+$", job.head) else f"{job.head}:{DEFAULT_PORT}"
