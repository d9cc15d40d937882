"""Start the ranks of a node from the user's script, and say in one sentence why a run ends when a rank is killed.

Without torchrun or SLURM, the process of local rank 0 starts this script again for each other rank. If one of these
is killed, the others only see a lost connection, in which neither the rank nor the reason is named. Local rank 0 knows
both, as the parent of the process, and ends the run; the other ranks leave the report to it.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_dist.mesh.consensus import is_consequence
from lightning_dist.plugins import _compat

__all__ = ["RankLauncher", "describe_death", "starts_ranks"]

_LAUNCHER = "LIGHTNING_DIST_LAUNCHER"
"""Environment variable with the process id of the local rank 0 that has started the other ranks of the node."""

_POLL_S = 0.2
_SECONDS_TO_FAIL = 5.0
"""Seconds after the end of a rank within which rank 0 is expected to fail by itself, in a collective."""

_SECONDS_TO_EXIT = 60.0
"""Seconds in which rank 0, once it has failed, may finish its loggers and end."""

_SECONDS_FOR_OTHERS = 60.0
"""Seconds that rank 0 waits for the other ranks when its program has ended well."""

_children: list[subprocess.Popen[bytes]] = []
"""The processes that this one has started. All Trainers of a process use the same ones."""


def starts_ranks(environment: ClusterEnvironment) -> bool:
    """Return whether this process starts the node's other ranks or has done so, or was itself started in this way."""
    own = os.environ.get(_LAUNCHER) in (str(os.getpid()), str(os.getppid()))
    return own or not environment.creates_processes_externally


class RankLauncher(_compat.ScriptLauncher):
    """Start this script again for every local rank but the first, and end the run if one of them ends.

    Args:
        environment: Environment that gives each process its rank.
        num_processes: Number of processes on this node.
        num_nodes: Number of nodes.
        what_was_saved: Function that returns a sentence on what the run has saved.
    """

    def __init__(
        self, environment: ClusterEnvironment, num_processes: int, num_nodes: int, what_was_saved: Callable[[], str]
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self.procs = _children
        self._what_was_saved = what_was_saved

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks unless they run already, and call ``function`` on this one.

        Raises:
            SystemExit: If another rank of this node was killed; its text names the rank and the signal.
        """
        environment = self.cluster_environment
        if not environment.creates_processes_externally:
            os.environ[_LAUNCHER] = str(os.getpid())
            self.start_processes()
            _children[:], self.procs = self.procs, _children
            first = environment.node_rank() * self.num_processes
            _Observer.running = _Observer(first, self._what_was_saved)
            _Observer.running.start()
            atexit.register(_Observer.wait_for_others)
        self.limit_threads()
        _Observer.has_failed = True
        try:
            result = function(*args, **kwargs)
            _Observer.has_failed = False
            return result
        except Exception as error:
            text = _Observer.why_a_rank_was_killed() if is_consequence(error) else None
            if text is not None:
                raise SystemExit(text) from None
            if is_consequence(error) and not _Observer.running:
                self._end_with_launcher()
            raise

    def _end_with_launcher(self) -> None:
        """End this process if the one that has started it has ended, or ends soon.

        If the launcher has seen that a rank was killed, it kills this process meanwhile. It is not left to Python to
        end the process, because each use of the store that the launcher hosted would print an error of its own.
        """
        launcher, deadline = int(os.environ[_LAUNCHER]), time.monotonic() + _SECONDS_TO_FAIL
        while os.getppid() == launcher:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        local_rank = self.cluster_environment.local_rank()
        if local_rank == 1:
            _print(
                f"Rank {self.cluster_environment.global_rank() - local_rank}, which had started the others, has ended."
                " If it shows no error of its own above, it was killed, perhaps by the kernel's out-of-memory killer."
                f" {self._what_was_saved()}"
            )
        os._exit(1)


class _Observer(threading.Thread):
    """End the run when a process that this one has started ends by a signal or with an error.

    Args:
        first_rank: Global rank of this process.
        what_was_saved: Function that returns a sentence on what the run has saved.
    """

    running: _Observer | None = None
    """The observer of this process; None if it has started no others."""

    has_failed = False
    """Whether the last run of this process has ended by an error, or runs."""

    def __init__(self, first_rank: int, what_was_saved: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="lightning-dist: observer of ranks")
        self._first_rank = first_rank
        self._what_was_saved = what_was_saved
        self._why: str | None = None
        self._has_seen_end = threading.Event()
        self._fails = threading.Event()

    @override
    def run(self) -> None:
        while _children:
            codes = [child.poll() for child in _children]
            if any(codes):
                local_rank, code = next((rank, code) for rank, code in enumerate(codes, 1) if code)
                self._end_run(self._first_rank + local_rank, code)
                return
            if all(code == 0 for code in codes):
                return
            time.sleep(_POLL_S)

    @classmethod
    def why_a_rank_was_killed(cls) -> str | None:
        """Return why a process was killed that this one has started; None if none was. It may take a second."""
        observer = cls.running
        if observer is None:
            return None
        observer._has_seen_end.wait(5 * _POLL_S)
        if observer._why is not None:
            observer._fails.set()
        return observer._why

    @classmethod
    def wait_for_others(cls) -> None:
        """Wait until the processes that this one has started have ended, so that it ends as they do.

        If one of them fails, the observer ends this process with its exit code.
        """
        deadline = time.monotonic() + _SECONDS_FOR_OTHERS
        while (
            not cls.has_failed and not hasattr(sys, "last_value") and any(child.poll() is None for child in _children)
        ):
            if time.monotonic() > deadline:
                _print(
                    f"Rank 0 has ended {_SECONDS_FOR_OTHERS:.0f} s ago, and other ranks still run. They go on alone."
                )
                return
            time.sleep(_POLL_S / 4)
        if cls.running is not None and not cls.has_failed:
            cls.running.join(_SECONDS_TO_FAIL + 5 * _POLL_S)

    def _end_run(self, rank: int, code: int) -> None:
        """End all ranks of the node after ``rank`` has ended with exit code ``code``, or by the signal ``-code``."""
        for child in _children:  # The others would only print that they have lost a connection.
            child.kill()
        is_killed = code < 0 and -code != signal.SIGINT
        if is_killed:
            self._why = f"{describe_death(rank, -code)} {self._what_was_saved()}".rstrip()
        self._has_seen_end.set()
        if self._fails.wait(_SECONDS_TO_FAIL):
            time.sleep(_SECONDS_TO_EXIT)
        else:
            _print(self._why or f"Rank {rank} has ended with exit code {code}, which ends the run.")
        os._exit(1 if code < 0 else code)


def _print(text: str) -> None:
    sys.stdout.flush()
    print(text.rstrip(), file=sys.stderr, flush=True)


def describe_death(rank: int, number: int) -> str:
    """Return a sentence that says that ``rank`` was ended by the signal ``number``, and the usual reason for it."""
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        return f"Rank {rank} was killed by {name}, perhaps by the kernel's out-of-memory killer (dmesg shows it)."
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        return f"Rank {rank} crashed in native code, by {name}; PYTHONFAULTHANDLER=1 shows the line that called it."
    return f"Rank {rank} was ended by {name}."
