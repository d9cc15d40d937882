"""Detect hangs: when a rank makes no progress, a watchdog process reports who hangs and why, and ends the node's ranks.

The first rank of each node starts one process (``watchdog_process``) that watches all ranks of the node. Each rank
regularly writes the time into memory that it shares with this process; this is called a beat. When beats are missing,
the process asks every rank for its stacks and for its pending collectives. It requests the stacks by a signal, which
faulthandler answers even while C code holds the GIL, and the collectives over a socket, which a thread of the rank
reads. Both work while the rank's main thread waits in a collective.
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

from lightning_dist import _compat
from lightning_dist.mesh.layout import STAGE_TO_STAGE
from lightning_dist.run import watchdog_process

__all__ = ["EXIT_HANG", "Watchdog", "record_collectives"]

EXIT_HANG = 76
"""Exit code of ranks that were ended because a rank hangs. Ranks that cannot answer are killed instead."""

NUM_RECORDED = 2000
"""Number of collectives that :func:`record_collectives` lets each rank keep; torch's own default in 2.11 to 2.13."""

_RUN_PACKAGE = (  # It is `python -m` without an import of the parent package, which imports torch.
    "import runpy, sys; folder, name = sys.argv[1:3]; del sys.argv[1:3]; sys.path.append(folder);"
    " runpy.run_module(name, run_name='__main__')"
)


def record_collectives() -> None:
    """Let torch's flight recorder record the last collectives of this process, unless the user has set a number.

    This must be called before the first process group is created, when torch reads ``TORCH_FR_BUFFER_SIZE``, or else
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(NUM_RECORDED))


class Watchdog:
    """Connect a rank to the watchdog process of its node. This needs Linux 5.3 or newer.

    If a rank, after its first :meth:`beat`, does not beat for ``timeout_s``, all ranks of the node are ended, with a
    report on standard error and in ``folder``: ``watchdog.txt`` (``watchdog-rank<first rank>.txt`` on nodes without
    rank 0), and for each rank ``stacks-rank<rank>.txt`` and ``flight_recorder-rank<rank>.json``. Time in which all
    ranks of the node are stopped (Ctrl-Z, a suspended job) does not count.

    torch's flight recorder records the collectives of gloo and NCCL unless ``TORCH_FR_BUFFER_SIZE`` is 0, see
    :func:`record_collectives`. Without it, the report has only the stacks and the number of collectives that each rank
    has entered. ``python -m lightning_dist.run.watchdog_process.explain`` compares the files of several nodes.

    Args:
        folder: Folder for the reports, created with the first report; the same on all ranks of a node.
        timeout_s: Longest time between two beats in seconds; must exceed the longest step, checkpoint or compilation.
        rank: Global rank of this process.
        local_rank: Rank of this process on its node; local rank 0 starts the watchdog process.
        local_world_size: Number of ranks on this node.
        name: Name of the run; the same on all ranks of the node, and different from that of any other run.
        on_hang: Function that is called with the report, in a thread, before this rank is ended; it may take 10
            seconds.

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
            raise ValueError(f"timeout_s={timeout_s} must be positive, and longer than the longest time between steps.")
        self._folder = folder.absolute()
        self._timeout_s = timeout_s
        self._rank = rank
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        # The socket is in the abstract namespace, without a file. Its name is a digest, because at most 107 bytes are
        # allowed.
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
        """Connect to the node's watchdog process, which local rank 0 starts, without waiting for the other ranks.

        Raises:
            RuntimeError: If this system is not supported, this watchdog is started already, another run uses the same
                name, or the watchdog process has ended.
            TimeoutError: If local rank 0 does not start the process within a minute.
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
        """Record that this rank makes progress, and expect further beats. This takes less than a microsecond.

        Args:
            step: Number of the training step, which the report shows.
        """
        self._cells[1] = step
        self._cells[0] = time.monotonic_ns()

    def disarm(self) -> None:
        """Stop expecting beats until the next one, before a long operation such as a download or the last save."""
        self._cells[0] = 0

    def close(self) -> None:
        """Disconnect from the watchdog process, which ends when all ranks have disconnected."""
        # The connection is cleared first, because the process may end at once, and _answer would report its death.
        connection, self._connection = self._connection, None
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
            for _ in _tries():  # The watchdog of the previous run with this name may still be ending.
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
                start_new_session=True,  # Ctrl-C then reaches only the ranks.
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
        """Answer the requests of the watchdog process until it ends."""
        is_hang = False
        with suppress(OSError):
            for line in lines:
                message = json.loads(line)
                if message["do"] == "look":
                    # The groups are sent first, because NCCL's flight recorder queries the device, which may hang too.
                    _send(connection, groups=_groups())
                    _send(connection, entries=_entries())
                elif message["do"] == "report":
                    is_hang = True
                    threading.Thread(target=self._report, args=(connection, message["text"]), daemon=True).start()
                elif message["do"] == "exit":
                    os._exit(EXIT_HANG)
        if is_hang:
            os._exit(EXIT_HANG)
        if self._connection is connection:
            print(
                f"lightning-dist: the watchdog of rank {self._rank} has died: hangs are no longer detected",
                file=sys.stderr,
            )
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
    """Find a real-time signal that this process does not handle, ignore or block, neither in Python nor in C.

    Raises:
        RuntimeError: If there is none.
    """
    with open("/proc/self/status") as status:
        masks = dict(line.split(":\t") for line in status if line.startswith("Sig"))
    used = int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16) | int(masks["SigBlk"], 16)
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
        if not used >> (number - 1) & 1:
            return number
    raise RuntimeError("the watchdog needs a real-time signal, and this process has handlers for all of them")


def _groups() -> list[dict[str, Any]]:
    """Describe the process groups of this rank, with the number of collectives that it has entered in each."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups = []
    for group in _compat.process_groups():
        with suppress(RuntimeError, ValueError):  # Backends that do not count collectives raise these errors.
            groups.append(
                {
                    "name": group.group_name,
                    "description": group.group_desc,
                    "ranks": dist.get_process_group_ranks(group),
                    "entered": _compat.num_collectives(group),
                    "is_p2p": group.group_desc == STAGE_TO_STAGE,  # The numbers of sends differ between ranks.
                }
            )
    return groups


def _entries() -> list[dict[str, Any]]:
    """Return the flight recorder's entries of the last collectives, oldest first."""
    if not dist.is_available():
        return []
    return sorted(_compat.recorded_collectives(), key=lambda entry: entry["time_created_ns"])
