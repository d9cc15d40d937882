"""Let a process of its own send what a training logs to MLflow."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_dist.plugins.loggers.json_socket import JsonSocket
from lightning_dist.plugins.loggers.run_identity import OpenRun
from lightning_dist.plugins.loggers.sender import Job, Outcome
from lightning_dist.plugins.loggers.spool import Entry

__all__ = ["SenderProcess"]

_PACKAGES = ("lightning_dist", "lightning_dist.plugins", "lightning_dist.plugins.loggers")
_RUN = """\
import json, sys, types
sys.path[:], packages = map(json.loads, sys.argv[1:3])
for name, path in packages.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from lightning_dist.plugins.loggers.sender_main import main
main()
"""
"""Program of the process. It replaces the packages by empty ones with the same modules, since their own ``__init__``
imports torch and Lightning, which takes seconds and hundreds of MiB."""

_CHECK_EVERY_S = 5.0
_END_WITHIN_S = 10.0


class SenderProcess:
    """Run a :class:`~lightning_dist.plugins.loggers.sender.Sender` in a process of its own.

    Making a call of MLflow's client takes the interpreter for about 20 ms per 1,000 values, during which the training
    thread would wait. The process has a low priority, is in a session of its own, so that Ctrl-C does not reach it, and
    ends when this process does, however that happens. If it ends before, for example because the kernel has killed it
    for its memory, it is started again, and sends again what is still in the spool.

    Args:
        job: The run, the spool and the times of attempts.
        receive: Function that is called on a background thread with the outcome of every attempt.
        warn: Function that is called on a background thread with the text of every warning.
    """

    def __init__(self, job: Job, receive: Callable[[Outcome], None], warn: Callable[[str], Any]) -> None:
        self._job = job
        self._receive = receive
        self._warn = warn
        self._request: dict[str, Any] = {"number": 0, "unwritten": ()}
        self._connection: JsonSocket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # It guards the request and the connection.
        self._is_closing = False
        self._wakes = threading.Event()
        self._thread = threading.Thread(target=self._run_until_end, name="mlflow_send", daemon=True)

    def start(self) -> None:
        """Start the process in the background."""
        self._thread.start()

    def ask(self, number: int, unwritten: Sequence[Entry]) -> None:
        """Ask for an attempt now; see :meth:`lightning_dist.plugins.loggers.sender.Sender.ask`."""
        with self._lock:
            self._request = {"number": number, "unwritten": unwritten}
            if self._connection is not None:
                self._connection.send(self._request)
        self._wakes.set()

    def close(self) -> None:
        """End the process without waiting for an attempt that it is making."""
        with self._lock:
            self._is_closing = True
            if self._connection is not None:
                self._connection.end()
        self._wakes.set()
        self._thread.join()

    def _run_until_end(self) -> None:
        pause = self._job.first_retry_s
        while not self._is_closing:
            has_answered, end = False, ""
            try:
                for outcome in self._outcomes_of_new_process():
                    has_answered = True
                    self._receive(outcome)
            except OSError as error:
                end = f"could not be started: {error}"
            if self._is_closing:
                return
            end = end or self._end_of_process()
            self._wakes.clear()
            if has_answered:
                pause = self._job.first_retry_s
                self._warn(f"The process that sends to MLflow {end}. It is started again, and sends what is left.")
                continue
            self._receive(Outcome(self._request["number"], error=f"the process that sends to it {end}"))
            self._wakes.wait(pause)
            pause = min(2 * pause, self._job.max_retry_s)

    def _outcomes_of_new_process(self) -> Iterator[Outcome]:
        """Start a process, and yield the outcomes of its attempts until it has ended.

        Raises:
            OSError: If it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._process = process = _started(theirs)
            connection = JsonSocket(ours)
            connection.send({"argv": sys.argv, "job": self._job.as_json()})
            try:
                with self._lock:
                    self._connection = connection
                    connection.send(self._request)
                    if self._is_closing:
                        connection.end()
                # A process that is started after this one must not create the run again.
                self._job = replace(self._job, is_first_try=False)
                for message in connection.messages(lambda: process.poll() is not None, _CHECK_EVERY_S):
                    if "warning" in message:
                        self._warn(message["warning"])
                    else:
                        yield self._outcome(message["outcome"])
            finally:
                with self._lock:
                    self._connection = None
                try:
                    process.wait(_END_WITHIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _outcome(self, outcome: dict[str, Any]) -> Outcome:
        if outcome["run"] is not None:
            self._job = replace(self._job, run=OpenRun(**outcome["run"]))
        return Outcome(**{**outcome, "run": self._job.run})

    def _end_of_process(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        if code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"has ended with code {code}"


def _started(connection: socket.socket) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise OSError("sys.executable is empty")
    packages = {name: list(sys.modules[name].__path__) for name in _PACKAGES}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _RUN, json.dumps(sys.path), json.dumps(packages), str(os.getpid())],
        stdin=connection.fileno(),
        stdout=None if _is_open(1) else subprocess.DEVNULL,
        stderr=None if _is_open(2) else subprocess.DEVNULL,
        start_new_session=True,
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
