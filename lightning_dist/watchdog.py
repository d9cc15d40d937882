"""Hangs: when a rank makes no step for a while, a process of its own says which and why, and ends the node's ranks.

One process watches the ranks of a node (``watchdog_process``), started by the first of them. A rank that beats
writes the time into memory which both share. When beats are missing, the process asks every rank for its stacks, by a
signal that faulthandler answers even while C code holds the GIL, and for the collectives it is in, by a socket that a
thread listens to; both work while the main thread waits in a collective.
"""

from __future__ import annotations

import errno
import faulthandler
import hashlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_dist import _compat, watchdog_process
from lightning_dist.layout import STAGE_TO_STAGE

__all__ = ["EXIT_HANG", "Watchdog"]

EXIT_HANG = 76
"""The exit code of ranks that were ended because one hangs. Those that could not answer are killed."""

_RUN_PACKAGE = (  # as -m does, without importing the packages around it, and torch with them
    "import runpy, sys; folder, name = sys.argv[1:3]; del sys.argv[1:3]; sys.path.append(folder);"
    " runpy.run_module(name, run_name='__main__')"
)


class Watchdog:
    """A rank's end of the node's watchdog. Linux 5.3 or newer.

    From its first :meth:`beat` on, a rank that does not beat for ``timeout_s`` ends all ranks of the node, with a
    report on standard error and in ``folder``: ``watchdog.txt`` (``watchdog-rank<first rank>.txt`` on nodes without
    rank 0), and for each rank ``stacks-rank<rank>.txt`` and ``flight_recorder-rank<rank>.json``. Time in which all
    ranks of the node are stopped (Ctrl-Z, a suspended job) does not count.

    torch records collectives unless ``TORCH_FR_BUFFER_SIZE`` is 0; then the report has only the stacks, and how many
    collectives each rank has entered.

    Args:
        folder: For the reports; made when there is one. The same on all ranks of a node.
        timeout_s: Seconds without a beat. More than the longest step, checkpoint or compilation between two beats.
        rank: This process among all.
        local_rank: This process on its node; 0 starts the process that watches.
        local_world_size: Number of processes on this node.
        name: The same on all ranks of the node, and no other run's.
        on_hang: Called in a thread, with the report, before this rank is ended; it has 10 seconds.

    Raises:
        ValueError: If ``timeout_s`` is not positive.
    """

    def __init__(
        self,
        folder: Path,
        timeout_s: float,
        rank: int,
        local_rank: int,
        local_world_size: int,
        name: str,
        on_hang: Callable[[str], object] | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: must be positive; more than the longest time between two steps")
        self._folder = folder.absolute()
        self._timeout_s = timeout_s
        self._rank = rank
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        # A socket without a file; its name has at most 107 bytes.
        digest = hashlib.sha256(name.encode()).hexdigest()
        self._address = f"\0lightning-dist/{os.getuid()}/{digest}" if sys.platform == "linux" else digest
        self._name = name
        self._on_hang = on_hang
        self._cells = memoryview(bytearray(16)).cast("q")
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stacks: Any = None
        self._signal = 0

    def start(self) -> None:
        """Join the node's watchdog, which the first local rank starts. Does not wait for the other ranks.

        Raises:
            RuntimeError: If this system cannot, or this rank's watchdog is started already.
            TimeoutError: If the first local rank does not start it within a minute.
        """
        if not _is_supported():
            raise RuntimeError("the watchdog needs Linux 5.3 or newer (pidfd_open); switch it off on this system")
        if self._connection is not None:
            raise RuntimeError("the watchdog is started already: close it first")
        if self._local_rank == 0:
            self._launch()
        connection = self._connect()
        self._signal = _free_signal()
        beats = os.memfd_create("watchdog-beats")
        os.ftruncate(beats, 16)
        self._stacks = open(os.memfd_create("watchdog-stacks"), "wb", buffering=0)  # noqa: SIM115 - until close()
        faulthandler.register(self._signal, file=self._stacks, all_threads=True)
        hello = {"rank": self._rank, "signal": self._signal, "main_thread": threading.main_thread().ident}
        lines = connection.makefile("rb")
        self._connection = connection
        self._cells = memoryview(mmap.mmap(beats, 16)).cast("q")
        try:
            socket.send_fds(connection, [json.dumps(hello).encode()], [beats, self._stacks.fileno()])
            welcome = lines.readline()
        except OSError:
            welcome = b""
        os.close(beats)
        if not welcome:
            self.close()
            raise RuntimeError(f"rank {self._rank}: the process that watches this node's ranks has ended")
        connection.settimeout(None)
        threading.Thread(
            target=self._answer, args=(connection, lines, self._process), name="watchdog", daemon=True
        ).start()

    def beat(self, step: int) -> None:
        """Note that this rank makes progress; from now on it must go on to. Costs less than a microsecond.

        Args:
            step: For the report.
        """
        self._cells[1] = step
        self._cells[0] = time.monotonic_ns()

    def disarm(self) -> None:
        """Wait for no beat until the next one: before what may take long, such as a download or the last save."""
        self._cells[0] = 0

    def close(self) -> None:
        """Leave the node's watchdog; it ends when all ranks have."""
        connection, self._connection = self._connection, None  # first: the process may end at once
        if connection is None:
            return
        self.disarm()
        with suppress(OSError):
            _send(connection, closed=True)
        self._cells = memoryview(bytearray(16)).cast("q")
        faulthandler.unregister(self._signal)
        self._stacks.close()

    def _launch(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            for _ in _tries():  # the last run of this name may not have heard from all its ranks yet
                try:
                    listener.bind(self._address)
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
            else:
                raise RuntimeError(f"a watchdog with name={self._name!r} runs on this node: give each run its own name")
            listener.listen(self._local_world_size)
            package = Path(watchdog_process.__file__).absolute().parent
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _RUN_PACKAGE, str(package.parent), package.name),
                    *(str(listener.fileno()), str(self._folder), str(self._timeout_s), str(self._local_world_size)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a Ctrl-C is for the ranks
                cwd="/",
            )

    def _connect(self) -> socket.socket:
        for _ in _tries():
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(watchdog_process.JOIN_S)
            try:
                connection.connect(self._address)
                return connection
            except ConnectionRefusedError:
                connection.close()
        raise TimeoutError(
            f"rank {self._rank} found no watchdog on this node within {watchdog_process.JOIN_S:.0f} s: the rank with"
            f" local_rank=0 must start one with the same name={self._name!r}"
        )

    def _answer(self, connection: socket.socket, lines: Any, process: subprocess.Popen[bytes] | None) -> None:
        """Do what the process asks for, until it ends."""
        is_hang = False
        with suppress(OSError):
            for line in lines:
                message = json.loads(line)
                if message["do"] == "look":
                    _send(connection, groups=_groups())  # on its own: the recorder asks the device, which may hang too
                    _send(connection, entries=_entries())
                elif message["do"] == "report":
                    is_hang = True
                    threading.Thread(target=self._report, args=(connection, message["text"]), daemon=True).start()
                elif message["do"] == "exit":
                    os._exit(EXIT_HANG)
        if is_hang:
            os._exit(EXIT_HANG)
        if self._connection is connection:
            print(f"lightning-dist: the watchdog of rank {self._rank} has died: hangs go unseen", file=sys.stderr)
        connection.close()
        if process is not None:
            process.wait()

    def _report(self, connection: socket.socket, text: str) -> None:
        try:
            if self._on_hang is not None:
                self._on_hang(text)
        finally:
            with suppress(OSError):
                _send(connection, done=True)


def _is_supported() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _send(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _tries() -> Iterator[None]:
    deadline = time.monotonic() + watchdog_process.JOIN_S
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


def _free_signal() -> int:
    """A real-time signal that nobody handles, ignores or blocks: not in Python, and not in C."""
    with open("/proc/self/status") as status:
        masks = dict(line.split(":\t") for line in status if line.startswith("Sig"))
    used = int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16) | int(masks["SigBlk"], 16)
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
        if not used >> (number - 1) & 1:
            return number
    raise RuntimeError("the watchdog needs a real-time signal, and this process has handlers for all of them")


def _groups() -> list[dict[str, Any]]:
    """The process groups that this rank is in, and how many collectives of each it has entered."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups = []
    for group in _compat.process_groups():
        with suppress(RuntimeError, ValueError):  # backends that do not count
            groups.append(
                {
                    "name": group.group_name,
                    "description": group.group_desc,
                    "ranks": dist.get_process_group_ranks(group),
                    "entered": _compat.num_collectives(group),
                    "is_p2p": group.group_desc == STAGE_TO_STAGE,  # ranks enter different numbers of these
                }
            )
    return groups


def _entries() -> list[dict[str, Any]]:
    """The last collectives, as the flight recorder has them."""
    if not dist.is_available():
        return []
    return sorted(_compat.recorded_collectives(), key=lambda entry: entry["time_created_ns"])
