"""Jobs that a test disturbs from outside, or that must be started as users start them."""

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
    """A process of its own that need not import anything: forked from the fork server, like those of the pool.

    It has what tests use of :class:`subprocess.Popen`, and leads a process group. How an interpreter starts and ends
    is not shown by it.

    Args:
        function: Called with ``args`` in the process; at module level.
        args: To be pickled.
        environment: All that the process has.
        is_parent: It starts processes by multiprocessing. Then the test must end it: it is not killed with the session.
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
        """What it prints until its end. Raises AssertionError, and kills it, where that is not within ``timeout`` s."""
        late = threading.Event()
        killer = threading.Timer(timeout, lambda: (late.set(), self.kill()))
        killer.start()
        output = self.stdout.read()
        self._process.join()
        killer.cancel()
        assert not late.is_set(), f"still running after {timeout} s: {output[-3000:]}"
        return output, None

    def kill(self) -> None:
        """With all processes of its group."""
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
    """As ``python script arguments``."""
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


Job = Forked | subprocess.Popen[str]


def wait_for(process: Job, text: str, count: int) -> str:
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if seen.count(text) >= count:
            return seen
    raise AssertionError(seen)


def launch(script: str, folder: Path, *arguments: str, forked: bool = False) -> tuple[Job, int]:
    """Start ``script`` with ``folder`` and ``arguments``, and wait until both of its ranks have printed READY.

    Args:
        script: Its text.
        folder: Also where it is written.
        arguments: After the folder.
        forked: Whether the process of rank 0 may be a :class:`Forked`.

    Returns:
        The process of rank 0, and the process id of the other one.
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
