"""Run training jobs in separate processes, for tests that send signals to a job or start it as a user would."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.pool import fork_server

__all__ = ["ROOT", "Forked", "Job", "launch", "run_script", "wait_for"]

ROOT = Path(__file__).parents[1]


class Forked:
    """Run a function in a new process that is forked from the fork server and so need not import anything.

    It has the part of the interface of :class:`subprocess.Popen` that the tests use, and its process leads a process
    group. The start and the shutdown of a Python interpreter are not tested with it.

    Args:
        function: Function at module level that the process calls with ``args``.
        args: Arguments of the function, which are pickled.
        environment: All environment variables of the process.
        is_parent: Whether the process starts further processes by multiprocessing. Such a process is not a daemon, so
            the test must end it: it is not killed at the end of the test session.
    """

    def __init__(
        self, function: Callable[..., Any], *args: Any, environment: dict[str, str], is_parent: bool = False
    ) -> None:
        context = fork_server()
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_in_fork, args=(theirs, environment, function, args), daemon=not is_parent
        )
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), errors="replace")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for the process to end, and return everything that it prints, and None for stderr.

        Raises:
            AssertionError: If the process has not ended after ``timeout`` seconds; it is killed then.
        """
        late = threading.Event()
        killer = threading.Timer(timeout, lambda: (late.set(), self.kill()))
        killer.start()
        output = self.stdout.read()
        self._process.join()
        killer.cancel()
        assert not late.is_set(), f"still running after {timeout} s: {output[-3000:]}"
        return output, None

    def kill(self) -> None:
        """Kill the process and all other processes of its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _in_fork(output: Connection, environment: dict[str, str], function: Callable[..., Any], args: Any) -> None:
    os.setpgid(0, 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


def run_script(script: Path, *arguments: str) -> None:
    """Run a script in this process as ``python script arguments`` would."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


Job = Forked | subprocess.Popen[str]


def wait_for(process: Job, text: str, count: int) -> str:
    """Read the output of a job until it has ``count`` occurrences of ``text``, and return the output so far."""
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if seen.count(text) >= count:
            return seen
    raise AssertionError(seen)


def launch(script: str, folder: Path, *arguments: str, forked: bool = False) -> tuple[Job, int]:
    """Start a script with two ranks, and wait until both have printed READY.

    Args:
        script: Source code of the script.
        folder: Folder that the script is written to, and the script's first argument.
        arguments: Further arguments of the script.
        forked: Whether to start rank 0 as a :class:`Forked` instead of a new Python interpreter.

    Returns:
        The process of rank 0, and the process id of rank 1.
    """
    path = folder / "train.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process: Job
    if forked:
        process = Forked(run_script, path, str(folder), *arguments, environment=environment)
    else:
        process = subprocess.Popen(
            [sys.executable, path, str(folder), *arguments], text=True, cwd=ROOT, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    wait_for(process, "READY", 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return process, ranks[-1]
