"""The process that watches the ranks of a node: it finds the one that hangs, says why, and ends them all.

Started by :class:`lightning_dist.watchdog.Watchdog`, by its path and with the standard library alone: it runs at once,
and what makes the ranks hang does not make it hang. Ranks connect to its socket; each hands over two files in memory,
one with the time of its last beat, one for its stacks. They talk in lines of JSON. A rank's end is seen by its pidfd,
which, unlike its number, is never another process's.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

ANSWER_S = 5.0
"""How long ranks have to say which collectives they are in."""
ON_HANG_S = 10.0
"""How long the callbacks of the ranks may take."""
WRITE_S = 10.0
"""How long writing the report may take: the disk may be what hangs."""
JOIN_S = 60.0
"""How long the first rank waits for the process, and the process for the other ranks."""

_LIBRARIES = re.compile(
    "|".join(("<", *(re.escape(str(Path(file).absolute().parent)) + "/" for file in (os.__file__, __file__))))
    + "|.*/(site|dist)-packages/"
)
_EXCHANGES = ("lightning_dist/collectives.py", "torch/distributed/distributed_c10d.py")
"""Files whose lines wait for other ranks."""
_STOPPED = {"T": "is stopped (SIGSTOP)", "t": "is held by a debugger"}


class Rank:
    """One rank of this node, as far as it can be seen from here."""

    def __init__(self, connection: socket.socket) -> None:
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            raise PermissionError(f"process {pid} is another user's")
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
        """Count the time without a beat while armed."""
        beat = self._cells[0]
        self.waited_s = self.waited_s + elapsed_s if beat and beat == self._beat else 0.0
        self._beat = beat

    def send(self, **message: Any) -> None:
        """Send a message, if the rank can take it."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> None:
        """Read what the rank has sent."""
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
        """Send a signal."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.process, number)

    def ask(self) -> None:
        """Ask for the stacks and the collectives. A rank that has closed has no handler left for the signal."""
        if not self.is_closed and not self.has_ended:
            self.kill(self._signal)
            self.send(do="look")

    @property
    def can_answer(self) -> bool:
        """Whether it is alive, watched and running."""
        return not (self.is_closed or self.has_ended or self.state in _STOPPED)

    @property
    def state(self) -> str:
        """The letter in /proc that says whether its main thread runs, sleeps or is stopped; empty if it has ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    @property
    def last_beat(self) -> str:
        """When it last beat."""
        beat, step = self._cells
        if not beat:
            return "not in the loop"
        return f"last beat {(time.monotonic_ns() - beat) / 1e9:.1f} s ago, at step {step}"

    @property
    def stacks(self) -> str:
        """What faulthandler wrote."""
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")

    @property
    def _frames(self) -> list[tuple[str, str, str]]:
        """File, line and function of the main thread's frames, innermost first."""
        for thread in self.stacks.split("\n\n"):
            if f"0x{self._main_thread:016x}" in thread:
                return re.findall(r'File "(.*)", line (\d+) in (.*)', thread)
        return []

    @property
    def place(self) -> str:
        """Where the main thread is: the innermost line that is not a library's, if there is one."""
        own = [frame for frame in self._frames if not _LIBRARIES.match(frame[0])]
        return next((_at(frame) for frame in own or self._frames), "")

    @property
    def exchange(self) -> str:
        """Where the main thread waits for other ranks, though the recorder knows of no collective: gloo's sends."""
        for file, line, function in self._frames[:1]:
            if file.endswith(_EXCHANGES):
                return f"{function} ({file}:{line})"
        return ""

    @property
    def pending(self) -> list[dict[str, Any]]:
        """The flight recorder's entries of collectives that are not completed, oldest first.

        Those of groups that call themselves background come last: nobody waits for them in a step.
        """
        entries = [entry for entry in self.entries or [] if not entry["retired"] and entry["state"] != "completed"]
        return sorted(entries, key=lambda entry: entry["process_group"][1].startswith("background"))

    def entry(self, like: dict[str, Any]) -> dict[str, Any] | None:
        """This rank's entry of the same group and number, if it has one."""
        return next((entry for entry in self.entries or [] if _key(entry) == _key(like)), None)


def _at(frame: tuple[str, str, str]) -> str:
    file, line, function = frame
    return f"{file}:{line} in {function}"


def _key(entry: dict[str, Any]) -> tuple[str, str, int, bool]:
    backend = entry["profiling_name"].partition(":")[0]
    return entry["process_group"][0], backend, entry["collective_seq_id"], entry["is_p2p"]


def _shape(entry: dict[str, Any]) -> tuple[str, Any]:
    """What must be the same on all ranks that enter a collective."""
    name = entry["profiling_name"]
    return name, entry["input_sizes"] if name.endswith("all_reduce") else None


def _listed(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, sorted(ranks)))}"


class Diagnosis:
    """Who is the cause, and what each rank does.

    A rank that is stopped, has died or does not answer is. Otherwise a rank is that waits in no collective itself and
    has not entered one that others wait in. Otherwise those are that disagree on what a group's next collective is.
    """

    def __init__(self, ranks: list[Rank], timeout_s: float) -> None:
        self.ranks = ranks
        self._timeout_s = timeout_s
        self._states = {rank: rank.state for rank in ranks}
        self._waits = {rank: rank.pending[0] for rank in ranks if rank.pending}
        self.culprits, self.cause = self._find()

    def _find(self) -> tuple[list[Rank], str]:
        broken = [rank for rank in self.ranks if self._breakdown(rank)]
        silent = [rank for rank in self.ranks if rank.groups is None and not rank.is_closed and rank not in broken]
        if not broken and len(silent) < len(self.ranks):
            broken = silent
        if broken:
            return broken, self._whats(broken)
        free = [rank for rank in self.ranks if rank not in self._waits and not rank.exchange]
        late = [rank for rank in free if self._is_behind(rank)] or [
            rank for rank in free if rank.waited_s > self._timeout_s
        ]
        if late:
            return late, self._whats(late)
        for (first, entry), (second, other) in combinations(self._waits.items(), 2):
            if _key(entry) == _key(other) and _shape(entry) != _shape(other):
                return self._minority(entry), (
                    f"rank {first.number} is in {self._name(entry)} {entry['input_sizes']} of"
                    f" {self._group(first, entry)}, and rank {second.number} in {self._name(other)}"
                    f" {other['input_sizes']}: the ranks call different collectives"
                )
            if first in self._missing(second) and second in self._missing(first):
                return [first, second], (
                    f"rank {first.number} is in {self._name(entry)} of {self._group(first, entry)}, and rank"
                    f" {second.number} in {self._name(other)} of {self._group(second, other)}: each waits for the"
                    " other, as they call them in another order"
                )
        return [], "no rank of this node is the cause, but one of another node, or what connects them"

    def _whats(self, ranks: list[Rank]) -> str:
        whats = list(dict.fromkeys(self.what(rank) for rank in ranks))
        subject = "it" if len(ranks) == 1 else "each" if len(whats) == 1 else "one"
        return "; ".join(f"{subject} {what}" for what in whats)

    def _breakdown(self, rank: Rank) -> str:
        if rank.has_ended:
            return "" if rank.said_goodbye else "has died"
        return _STOPPED.get(self._states[rank], "")

    def _is_behind(self, rank: Rank) -> bool:
        if any(rank in self._missing(other) for other in self._waits):
            return True
        counts = {name: group["entered"] for name, group in (rank.groups or {}).items()}
        return not self._waits and any(
            name in counts and counts[name] < group["entered"]
            for other in self.ranks
            for name, group in (other.groups or {}).items()
        )

    def _missing(self, rank: Rank) -> list[Rank]:
        """The ranks of this node which are known not to be in what ``rank`` waits in."""
        entry = self._waits[rank]
        if entry["is_p2p"]:
            return []
        members = (rank.groups or {}).get(entry["process_group"][0], {}).get("ranks", [])
        return [
            other
            for other in self.ranks
            if other.number in members
            and other.entry(entry) is None
            and (other.entries is not None or (other.is_closed and not other.has_ended))
        ]

    def _minority(self, entry: dict[str, Any]) -> list[Rank]:
        shapes: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            if found := rank.entry(entry):
                shapes.setdefault(str(_shape(found)), []).append(rank)
        fewest = min(map(len, shapes.values()))
        return [rank for ranks in shapes.values() if len(ranks) == fewest for rank in ranks]

    def _name(self, entry: dict[str, Any]) -> str:
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        return f"{entry['profiling_name'].partition(':')[2]} #{number}"

    def _group(self, rank: Rank, entry: dict[str, Any]) -> str:
        name, description = entry["process_group"]
        members = (rank.groups or {}).get(name, {}).get("ranks", [])
        label = description if description and description != "undefined" else name
        return f"group {label} ({_listed(members)})"

    def what(self, rank: Rank) -> str:
        """What a rank does, to stand after its name."""
        place = rank.place or "a place that could not be found out"
        if self._breakdown(rank):
            return self._breakdown(rank)
        if rank.is_closed:
            return "has left the loop"
        if rank in self._waits:
            entry = self._waits[rank]
            missing = [other.number for other in self._missing(rank)]
            has_not = f", which {_listed(missing)} {'has' if len(missing) == 1 else 'have'} not entered" * bool(missing)
            return f"waits in {self._name(entry)} of {self._group(rank, entry)}{has_not}; it is in {place}"
        if rank.exchange:
            return f"waits in {rank.exchange}; it is in {place}"
        if rank.groups is None:
            return f"does not answer, a call into C holds the GIL; it is in {place}"
        disk = " (its main thread waits for a disk or a network file system)" if self._states[rank] == "D" else ""
        return f"is in {place}{disk}"

    def headline(self) -> str:
        """One sentence: who, why, and what the others wait in."""
        numbers = [rank.number for rank in self.culprits]
        who = f"{_listed(numbers)} {'hangs' if len(numbers) == 1 else 'hang'}" if numbers else "the training hangs"
        text = f"{who}: {self.cause}"
        waits: dict[str, list[int]] = {}
        for rank, entry in self._waits.items():
            if rank not in self.culprits:
                waits.setdefault(f"{self._name(entry)} of {self._group(rank, entry)}", []).append(rank.number)
        for rank in self.ranks:
            if rank not in self.culprits and rank not in self._waits and rank.exchange:
                waits.setdefault(rank.exchange, []).append(rank.number)
        for entry_text, waiting in waits.items():
            text += f"; {_listed(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {entry_text}"
        return text

    def lines(self) -> list[str]:
        """One a rank; of many that do the same, only the first."""
        shown: dict[str, list[int]] = {}
        for rank in self.ranks:
            shown.setdefault(self.what(rank), []).append(rank.number)
        return [f"{_listed(numbers)}: {what}" for what, numbers in shown.items()]

    def details(self) -> list[str]:
        """The rest of the report."""
        lines = []
        for rank in self.ranks:
            lines.append(f"rank {rank.number} (process {rank.pid}): {rank.last_beat}")
            for group in (rank.groups or {}).values():
                entered = f"{group['entered']} collectives entered"
                lines.append(f"  group {group['name']} {group['description']}, {_listed(group['ranks'])}: {entered}")
            lines += [f"  not completed: {self._name(entry)} of {self._group(rank, entry)}" for entry in rank.pending]
            if rank.entries == [] and any(group["entered"] for group in (rank.groups or {}).values()):
                lines.append("  the flight recorder is off: unset TORCH_FR_BUFFER_SIZE to see the collectives")
        return lines


class Node:
    """The ranks of this node, from the first that connects to the end of the last."""

    def __init__(self, listener: socket.socket, folder: Path, timeout_s: float, num_ranks: int) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._num_ranks = num_ranks
        self._interval_s = min(1.0, timeout_s / 10)
        self._ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._started = time.monotonic()

    def watch(self) -> None:
        """Return when all ranks have ended or closed, or have been ended."""
        before = time.monotonic()
        while not self._is_over():
            self._receive(self._interval_s)
            now = time.monotonic()
            # What this process did not see, because it was stopped itself, is not held against the ranks.
            elapsed, before = min(now - before, 2 * self._interval_s), now
            watched = [rank for rank in self._ranks if not rank.is_closed and not rank.has_ended]
            if all(rank.state in _STOPPED for rank in watched):  # Ctrl-Z, or a scheduler that suspended the job
                continue
            for rank in watched:
                rank.follow(elapsed)
            if any(rank.waited_s > self._timeout_s for rank in watched):
                self._end_all()
                return

    def _is_over(self) -> bool:
        if not self._ranks:
            return time.monotonic() - self._started > JOIN_S
        all_came = len(self._ranks) == self._num_ranks
        return all(rank.has_ended or (rank.is_closed and all_came) for rank in self._ranks)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            rank = Rank(connection)
        except (OSError, ValueError):
            connection.close()
            return
        rank.send(do="welcome")
        self._ranks.append(rank)
        self._ranks.sort(key=lambda rank: rank.number)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(rank))
        self._selector.register(rank.process, selectors.EVENT_READ, lambda: self._note_end(rank))
        if len(self._ranks) == self._num_ranks:  # the name is free again
            self._selector.unregister(self._listener)
            self._listener.close()

    def _read(self, rank: Rank) -> None:
        rank.receive()
        if rank.is_closed:
            with suppress(KeyError):
                self._selector.unregister(rank.connection)

    def _note_end(self, rank: Rank) -> None:
        self._read(rank)
        rank.has_ended = True
        self._selector.unregister(rank.process)

    def _receive(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _receive_until(self, is_done: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not all(map(is_done, self._ranks)):
            self._receive(0.02)

    def _end_all(self) -> None:
        for rank in self._ranks:
            rank.ask()
        self._receive_until(lambda rank: not rank.can_answer or (rank.entries is not None and rank.stacks), ANSWER_S)
        diagnosis = Diagnosis(self._ranks, self._timeout_s)
        report = self._report(diagnosis)
        for rank in self._ranks:
            if rank.groups is not None:
                rank.send(do="report", text=report)
        # All of them first: when one leaves, a collective fails on the others, and they leave by themselves.
        self._receive_until(lambda rank: rank.groups is None or rank.is_done or rank.has_ended, ON_HANG_S)
        for rank in self._ranks:
            rank.send(do="exit")
        self._receive_until(lambda rank: rank.groups is None or rank.has_ended, ANSWER_S)
        for rank in self._ranks:
            rank.kill(signal.SIGKILL)

    def _report(self, diagnosis: Diagnosis) -> str:
        first = self._ranks[0].number
        path = self._folder / ("watchdog.txt" if first == 0 else f"watchdog-rank{first}.txt")
        head = [
            f"lightning-dist: {diagnosis.headline()}. No training step for {self._timeout_s:g} s; see {path}",
            *(f"  {line}" for line in diagnosis.lines()),
        ]
        if len(self._ranks) < self._num_ranks:
            head.append(f"  {self._num_ranks - len(self._ranks)} of this node's ranks never started their watchdog")
        report = "\n".join([*head, "", *diagnosis.details(), ""])

        def write() -> None:
            sys.stderr.write("\n".join(head) + "\n")
            sys.stderr.flush()
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(report)
            for rank in self._ranks:
                (self._folder / f"stacks-rank{rank.number}.txt").write_text(rank.stacks)
                trace = {"groups": list((rank.groups or {}).values()), "entries": rank.entries or []}
                (self._folder / f"flight_recorder-rank{rank.number}.json").write_text(json.dumps(trace))

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(WRITE_S)
        return report


def main() -> None:
    """Watch, as told by the command line: socket's descriptor, folder, timeout in seconds, number of ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, folder, timeout_s, num_ranks = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    Node(listener, Path(folder), float(timeout_s), int(num_ranks)).watch()


if __name__ == "__main__":
    main()
