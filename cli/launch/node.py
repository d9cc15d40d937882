"""Start the ranks of one node whose number among the nodes is known (``python -m lightning_dist.cli.launch.node``).

Torch's agent is for nodes that first have to find each other, and needs seconds to import. Nothing is started again
here: whoever has started this process does that, for all nodes together.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_dist.cli.launch.failure import Failure, attempt_folder
from lightning_dist.cli.launch.job import Job, python_words
from lightning_dist.cli.launch.output import print_new
from lightning_dist.cli.launch.rank import FINAL, FOLDER, end_of
from lightning_dist.cli.launch.torchrun import report

_POLL_S = 0.05
_SECONDS_TO_STOP = 300
"""Time that ranks have to save a checkpoint after a signal, before they are killed."""

_SECONDS_TO_FOLLOW = 30
"""Time that ranks have to end after one of them has ended as all of them should."""


class NodeRanks:
    """Run the ranks of a node until all have ended.

    Args:
        job: The job, with the numbers of nodes and devices, and the address of the first node, ``HOST:PORT``.
        node: Index of this node.
    """

    def __init__(self, job: Job, node: int) -> None:
        self._job = job
        self._node = node
        self._attempt = attempt_folder(job.logs, 0)
        self._shown = {"out": 0, "err": 0}
        self._signal: int | None = None

    def run(self) -> int:
        """Start the ranks, wait for their end, and return the exit code of the run."""
        self._attempt.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        ranks = [self._start(local) for local in range(self._job.num_devices)]
        try:
            failures = self._wait(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            self._show()
        if self._signal is not None:
            end = end_of(self._job.logs)
            return 128 + self._signal if end is None else end.code
        return report(self._job.logs, self._attempt, failures) if failures else 0

    def _note(self, number: int, _: object) -> None:
        self._signal = self._signal or number

    def _start(self, local: int) -> subprocess.Popen[bytes]:
        size = self._job.num_devices
        rank = self._node * size + local
        host, _, port = self._job.head.rpartition(":")
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self._job.num_nodes * size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": str(self._node),
            "MASTER_ADDR": host.strip("[]"),
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "launch",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "PYTHONUNBUFFERED": "1",  # Otherwise what a rank has written is lost when it is killed.
            FOLDER: str(self._job.logs),
        }
        environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // size, 1)))
        out, err = (self._attempt / f"rank_{rank}.{ending}" for ending in ("out", "err"))
        with out.open("w") as output, err.open("w") as errors:
            command = [sys.executable, *python_words(self._job)]
            return subprocess.Popen(command, env=environment, stdout=output, stderr=errors)

    def _wait(self, ranks: Sequence[subprocess.Popen[bytes]]) -> list[Failure]:
        """Wait until all ranks have ended, or must be ended, and return those that have failed by themselves."""
        is_passed_on, end_by = False, float("inf")
        first = self._node * self._job.num_devices
        while True:
            self._show()
            codes = [rank.poll() for rank in ranks]
            failures = [Failure(first + local, code) for local, code in enumerate(codes) if code]
            if None not in codes or time.monotonic() > end_by:
                return failures
            if self._signal is not None and not is_passed_on:
                is_passed_on, end_by = True, time.monotonic() + _SECONDS_TO_STOP
                for rank in ranks:
                    rank.send_signal(self._signal)
            if failures and self._signal is None:
                if not all(failure.code in FINAL for failure in failures):
                    return failures
                end_by = min(end_by, time.monotonic() + _SECONDS_TO_FOLLOW)
            time.sleep(_POLL_S)

    def _show(self) -> None:
        """Print what rank 0 has written, if it is on this node."""
        if self._node:
            return
        for ending, stream in (("out", sys.stdout), ("err", sys.stderr)):
            self._shown[ending] = print_new(self._attempt / f"rank_0.{ending}", self._shown[ending], stream)


def main(words: Sequence[str]) -> int:
    """Run the ranks of a node, and return the exit code of the run.

    Args:
        words: The options, and after ``--`` the words of the job.
    """
    parser = argparse.ArgumentParser(prog="python -m lightning_dist.cli.launch.node", description=__doc__)
    parser.add_argument("--node", type=int, required=True, help="index of this node")
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--devices", type=int, required=True, help="number of ranks of each node")
    parser.add_argument("--head", required=True, help="HOST:PORT of the first node")
    parser.add_argument("--logs", type=Path, required=True, help="folder of the output of the ranks")
    parser.add_argument("words", nargs="+", help="what each rank runs")
    options = parser.parse_args(words)
    job = Job(tuple(options.words), options.nodes, options.devices, 0, options.logs, options.head)
    return NodeRanks(job, options.node).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
