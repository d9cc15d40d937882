"""Watch the ranks of a node and end them when one hangs."""

from __future__ import annotations

import json
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import JOIN_S
from .diagnosis import Diagnosis
from .rank import ANSWER_S, STOPPED, Rank

__all__ = ["Node"]

ON_HANG_S = 10.0
"""Seconds that the ranks' ``on_hang`` callbacks may take."""
WRITE_S = 10.0
"""Seconds that writing the report may take; it is limited because the disk may be the cause of the hang."""


class Node:
    """Watch the ranks of this node, from the first connection until all of them have ended.

    Args:
        listener: Listening socket to which the ranks connect.
        folder: Folder for the reports.
        timeout_s: Seconds without a beat after which a rank counts as hanging.
        num_ranks: Number of ranks on this node.
    """

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
        """Watch until all ranks have ended or disconnected, or until this process has ended them because of a hang."""
        before = time.monotonic()
        while not self._is_over():
            self._receive(self._interval_s)
            now = time.monotonic()
            # This limits the time that counts after this process was stopped itself.
            elapsed, before = min(now - before, 2 * self._interval_s), now
            watched = [rank for rank in self._ranks if not rank.is_closed and not rank.has_ended]
            if all(rank.state in STOPPED for rank in watched):  # Ctrl-Z or a scheduler has suspended the job.
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
        if len(self._ranks) == self._num_ranks:  # Closing the socket lets the next run use its name.
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
        # No rank exits before all callbacks are done: its exit would make collectives fail on the others, which would
        # then end by themselves.
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
