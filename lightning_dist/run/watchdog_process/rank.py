"""Represent one rank in the watchdog process."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .records import Record

__all__ = ["ANSWER_S", "STOPPED", "Rank"]

ANSWER_S = 5.0
"""Seconds that ranks have to report their stacks and collectives, and to exit."""
STOPPED = {"T": "is stopped (SIGSTOP)", "t": "is held by a debugger"}
"""Descriptions of the states, by their letter in /proc, in which a process cannot run."""

_OWN_FOLDER = Path(__file__).absolute().parents[2]
_LIBRARIES = re.compile(
    "|".join(("<", *(re.escape(str(folder)) + "/" for folder in (Path(os.__file__).absolute().parent, _OWN_FOLDER))))
    + "|.*/(site|dist)-packages/"
)
_EXCHANGES = ("lightning_dist/mesh/collectives.py", "torch/distributed/distributed_c10d.py")
"""Files in which an innermost frame means that the rank waits for other ranks."""


class Rank:
    """Represent one rank of this node, with the data that it has sent and the kernel's data about its process.

    Args:
        connection: Socket of the rank, on which it has sent its first message.

    Raises:
        PermissionError: If the process at the other end belongs to another user.
    """

    def __init__(self, connection: socket.socket) -> None:
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            raise PermissionError(f"process {pid} belongs to another user")
        connection.settimeout(ANSWER_S)
        hello, files, _, _ = socket.recv_fds(connection, 4096, 2)
        beats, self._stacks = files
        connection.setblocking(False)
        about = json.loads(hello)
        self.number: int = about["rank"]
        self._signal: int = about["signal"]
        self._main_thread: int = about["main_thread"]
        self.pid = pid
        self.process = os.pidfd_open(pid)
        self.connection = connection
        self._received = b""
        self._cells = memoryview(mmap.mmap(beats, 16, prot=mmap.PROT_READ)).cast("q")
        os.close(beats)
        self._beat = 0
        self.waited_s = 0.0
        self.said_goodbye = False
        self.is_closed = False
        self.has_ended = False
        self.is_done = False
        self.groups: dict[str, dict[str, Any]] | None = None
        self.entries: list[dict[str, Any]] | None = None

    def follow(self, elapsed_s: float) -> None:
        """Count the time since the last beat, unless the rank has not begun to beat or is disarmed.

        Args:
            elapsed_s: Seconds since the last call.
        """
        beat = self._cells[0]
        self.waited_s = self.waited_s + elapsed_s if beat and beat == self._beat else 0.0
        self._beat = beat

    def send(self, **message: Any) -> None:
        """Send a message; errors are ignored."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> None:
        """Read the messages that the rank has sent."""
        try:
            while data := self.connection.recv(2**20):
                self._received += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.said_goodbye |= "closed" in message
            self.is_done |= "done" in message
            if "groups" in message:
                self.groups = {group["name"]: group for group in message["groups"]}
            if "entries" in message:
                self.entries = message["entries"]
        self.is_closed |= self.said_goodbye

    def kill(self, number: int) -> None:
        """Send signal ``number`` to the rank; errors are ignored."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.process, number)

    def ask(self) -> None:
        """Ask for the stacks and the collectives, unless the rank has disconnected: it then has no signal handler."""
        if not self.is_closed and not self.has_ended:
            self.kill(self._signal)
            self.send(do="look")

    @property
    def can_answer(self) -> bool:
        """Return whether the rank is alive, connected and not stopped."""
        return not (self.is_closed or self.has_ended or self.state in STOPPED)

    @property
    def state(self) -> str:
        """Return the letter in /proc of the main thread's state (running, sleeping, stopped); empty if it has ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    @property
    def last_beat(self) -> str:
        """Return a clause on the time and step of the last beat."""
        beat, step = self._cells
        if not beat:
            return "not in the loop"
        return f"last beat {(time.monotonic_ns() - beat) / 1e9:.1f} s ago, at step {step}"

    @property
    def stacks(self) -> str:
        """Return the stacks that faulthandler has written."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")

    @property
    def _frames(self) -> list[tuple[str, str, str]]:
        """Return file, line and function of the main thread's frames, innermost first."""
        for thread in self.stacks.split("\n\n"):
            if f"0x{self._main_thread:016x}" in thread:
                return re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
        return []

    @property
    def place(self) -> str:
        """Return where the main thread is: its innermost line outside of libraries, if there is one."""
        own = [frame for frame in self._frames if not _LIBRARIES.match(frame[0])]
        return next((_at(frame) for frame in own or self._frames), "")

    @property
    def exchange(self) -> str:
        """Return where the main thread waits for other ranks, found by its stack; empty if it does not.

        This finds gloo's sends, which the flight recorder does not record.
        """
        for file, line, function in self._frames[:1]:
            if file.endswith(_EXCHANGES):
                return f"{function} ({file}:{line})"
        return ""

    @property
    def record(self) -> Record | None:
        """Return the record of the rank's collectives; None: it is not known.

        A rank that has left the loop and answers no more has entered no collective that others wait in.
        """
        if self.entries is None and (not self.is_closed or self.has_ended):
            return None
        members = {name: group["ranks"] for name, group in (self.groups or {}).items()}
        return Record(self.entries or [], members)


def _at(frame: tuple[str, str, str]) -> str:
    file, line, function = frame
    return f"{file}:{line} in {function}"
