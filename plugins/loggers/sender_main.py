"""Run the process that sends what a training logs to MLflow.

It is started by :class:`~lightning_dist.plugins.loggers.sender_process.SenderProcess`, and imports neither torch nor
Lightning.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from lightning_dist.plugins.loggers.json_socket import JsonSocket
from lightning_dist.plugins.loggers.run_identity import OpenRun
from lightning_dist.plugins.loggers.sender import Job, Outcome, Sender
from lightning_dist.plugins.loggers.spool import Spool

__all__ = ["main"]

_NICENESS = 10
_CHECK_PARENT_EVERY_S = 0.5


def main() -> None:
    """Send as the messages of standard input say, which is a socket, until it is closed or the training has ended."""
    # A signal that is meant for the training may reach this process too, which must still send how the training ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    connection = JsonSocket(socket.socket(fileno=os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    parent = int(sys.argv[-1])
    messages = connection.messages(lambda: os.getppid() != parent, _CHECK_PARENT_EVERY_S)
    start = next(messages, None)
    if start is None:
        return
    sys.argv[:] = start["argv"]  # MLflow tags a run with the name and the commit of the program.
    _forward_warnings(connection)
    job = Job.from_json(start["job"])
    sender = Sender(job, lambda: Spool.for_reader(job.path), _Report(connection))
    sender.start()
    for message in messages:
        sender.ask(message["number"], message["unwritten"])
    # What is being sent now stays in the spool. It is not waited for, so that a process that resumes the training does
    # not meet this one.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.flush()
    os._exit(0)


class _Report:
    """Tell the training process the outcome of an attempt, and the run when it was opened."""

    def __init__(self, connection: JsonSocket) -> None:
        self._connection = connection
        self._told: OpenRun | None = None
        self._is_nice = False

    def __call__(self, outcome: Outcome) -> None:
        is_new = outcome.run is not self._told
        self._told = outcome.run
        self._connection.send({"outcome": asdict(outcome if is_new else replace(outcome, run=None))})
        if not self._is_nice:  # The training waits for the first outcome.
            self._is_nice = True
            os.nice(_NICENESS)  # On Linux, this is the priority of this thread alone, which is the one that sends.


def _forward_warnings(connection: JsonSocket) -> None:
    """Let the training process give the warnings of this package, and no others."""

    def forward(message: Warning | str, *_: Any, **__: Any) -> None:
        connection.send({"warning": str(message)})

    warnings.showwarning = forward
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", module=r"lightning_dist\.")
