"""Take what a run logs from the training thread, and have it sent to MLflow in the background."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.plugins.loggers.run_identity import OpenRun, RunIdentity
from lightning_dist.plugins.loggers.sender import Job, Outcome, Sender
from lightning_dist.plugins.loggers.sender_process import SenderProcess
from lightning_dist.plugins.loggers.spool import SUFFIX, Entry, Spool
from lightning_dist.plugins.loggers.store import UnusableStoreError, connect, is_local, is_served, missing_database

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["Outbox"]

_MAX_IN_MEMORY = 10_000
"""Number of entries that are kept in memory while they cannot be written to the disk."""


class Outbox:
    """Write what a run logs to a spool, and send it from there to MLflow.

    :meth:`put` takes microseconds, and waits for nothing. One background thread writes to the spool several times a
    second, and at once when a checkpoint is saved, so that a process that is killed loses nothing that the one that
    resumes does not log again. :meth:`put` does not wake it, because the operating system may let a thread that wakes
    take the core of the training thread. What is there is sent every few seconds, in few calls: by a process of its own
    if MLflow is a server, because the calls would take the interpreter from the training thread, and else by a thread.
    While MLflow cannot be reached, they go on trying. MLflow's own asynchronous logging cannot be used for this: it
    forgets what it could not send, sends in any order, and holds ten threads. As no call is made on the main thread,
    Ctrl-C, which Python raises there, cannot interrupt a transaction, which would leave an SQLite database locked.

    Args:
        identity: The run, which is opened in the background.
        folder: Folder of the spool. What earlier processes of the training have left in it is sent first.
        connect_timeout: Time in seconds for which :meth:`start` waits for the run.
        run: The run, if it is open already.
    """

    SEND_EVERY_S = 5.0
    """Time in seconds from one call to MLflow to the next."""
    WRITE_EVERY_S = 0.2
    """Time in seconds from one write to the spool to the next."""
    FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0
    """The first and the longest time in seconds between two attempts while MLflow cannot be reached."""

    def __init__(self, identity: RunIdentity, folder: Path, connect_timeout: float, run: OpenRun | None = None) -> None:
        self.run = run
        self.is_away = False
        self.num_lost = 0
        self.path = folder / f"{identity.started_at}-{identity.training[:12]}{SUFFIX}"
        self.identity = identity
        self._folder = folder
        self._connect_timeout = connect_timeout
        self._spool: Spool | None = None
        self._sender = self._new_sender()
        self._lazy_client = _LazyClient(identity.tracking_uri)
        self._in_memory: list[Entry] = []
        self._asked_to_send: dict[int, list[Entry]] = {}
        self._lock = threading.Lock()  # It guards the spool's creation, and the entries in memory.
        self._incoming: deque[Entry | Callable[[], Entry] | threading.Event] = deque()
        self._writes_now = threading.Event()
        self._must_write_soon = False
        self._attempts = threading.Condition()
        self._num_asked = self._num_answered = 0
        self._is_closing = False
        self._position: int | None = None
        self._unusable: UnusableStoreError | None = None
        self._warned_of_disk = False
        self._writer = threading.Thread(target=self._write, name="mlflow_write", daemon=True)

    def start(self) -> None:
        """Start writing and sending, and wait until the run is open or MLflow turns out to be away.

        Raises:
            UnusableStoreError: If the given run or experiment cannot be used, or the URI is not accepted.
        """
        if (database := missing_database(self.identity.tracking_uri)) is not None:
            rank_zero_info(f"Creating the MLflow database {database} (once, a few seconds).")
        self._writer.start()
        self._sender.start()
        atexit.register(self.close)
        # Creating an SQLite database takes seconds, and needs no connection.
        timeout = None if is_local(self.identity.tracking_uri) else self._connect_timeout
        if not self._attempt(timeout):
            self._report_away(f"it has not answered within connect_timeout={self._connect_timeout:g} s")
        if self._unusable is not None and self.run is None:
            self.close()
            raise self._unusable

    @property
    def client(self) -> MlflowClient | None:
        """Return a client of the store; None if there is none yet."""
        if isinstance(self._sender, Sender):
            return self._sender.client
        return cast("MlflowClient", self._lazy_client)

    def put(self, entry: Entry | Callable[[], Entry]) -> None:
        """Log an entry, or what a function returns that is called on a background thread."""
        self._incoming.append(entry)
        if self._must_write_soon:
            self._must_write_soon = False
            self._writes_now.set()

    def write_soon(self) -> None:
        """Write what is logged, and what is logged next, without delay, since a checkpoint is being saved.

        What belongs to the step of the checkpoint may be logged after the save has begun, and before it has ended.
        """
        self._must_write_soon = True
        self._writes_now.set()

    def flush(self) -> bool:
        """Wait until MLflow has everything, or cannot be reached; return whether it has everything."""
        written = threading.Event()
        self._incoming.append(written)
        self._writes_now.set()
        written.wait()
        self._attempt(None)
        return self.has_sent_all

    @property
    def has_sent_all(self) -> bool:
        """Return whether MLflow has everything that was written so far."""
        return not self._in_memory and (self._spool is None or self._spool.is_empty)

    def close(self) -> None:
        """Send what is left, and end the threads and the process. What MLflow has not got stays in the spool."""
        atexit.unregister(self.close)
        if self._is_closing:
            return
        self.flush()
        self._is_closing = True
        self._writes_now.set()
        self._writer.join()
        self._sender.close()
        self.num_lost += sum(len(entry.get("metrics", ())) for entry in self._in_memory)
        if self._spool is not None and self._position is not None:
            self._spool.sent(self._position)
        if self._spool is not None:
            if self._spool.is_empty:
                self._spool.remove()
            else:
                rank_zero_warn(
                    f"MLflow at {self.identity.tracking_uri} has not got everything: {self.path} keeps"
                    f" {self._spool.num_metrics} values of metrics. {_how_to_send(self._folder)}"
                )
                self._spool.close()
        if self.num_lost:
            rank_zero_warn(
                f"{self.num_lost} values of metrics are lost: MLflow did not take them, or they could not be kept in"
                f" {self.path} while it was away."
            )

    # The thread that writes

    def _write(self) -> None:
        while not self._is_closing:
            self._writes_now.wait(self.WRITE_EVERY_S)
            self._writes_now.clear()
            self._write_incoming()
            if self._in_memory and not self.is_away and self._num_asked == self._num_answered:
                self._ask()

    def _write_incoming(self) -> None:
        while self._incoming:
            item = self._incoming.popleft()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                entry = item() if callable(item) else item
                with self._lock:
                    self._keep(entry)
            except Exception as error:
                rank_zero_warn(f"{error!r} occurred while something was prepared for MLflow, which does not get it.")

    def _keep(self, entry: Entry) -> None:
        try:
            if self._spool is None:
                role: Literal["both", "writer"] = "both" if isinstance(self._sender, Sender) else "writer"
                self._spool = Spool(self.path, self.identity.header(), role)
            self._spool.append([entry])
        except OSError as error:
            self._in_memory.append(entry)
            if len(self._in_memory) > _MAX_IN_MEMORY:
                self.num_lost += len(self._in_memory.pop(0).get("metrics", ()))
            if not self._warned_of_disk:
                self._warned_of_disk = True
                rank_zero_warn(
                    f"What is logged to MLflow cannot be kept in {self.path} ({error.strerror or error}). While MLflow"
                    f" is away, only the newest {_MAX_IN_MEMORY} calls are kept, in memory. Training goes on."
                )

    # The thread or the process that sends

    def _new_sender(self) -> Sender | SenderProcess:
        job = Job(self.identity, self.path, self.SEND_EVERY_S, self.FIRST_RETRY_S, self.MAX_RETRY_S, self.run)
        if is_served(self.identity.tracking_uri):
            return SenderProcess(job, self._receive, rank_zero_warn)
        return Sender(job, lambda: self._spool, self._receive)

    def _ask(self) -> int:
        """Ask the sender to send now, and return the number of the request."""
        with self._attempts:
            self._num_asked += 1
            with self._lock:
                in_memory = list(self._in_memory)
            if in_memory:
                self._asked_to_send[self._num_asked] = in_memory
            self._sender.ask(self._num_asked, in_memory)
            return self._num_asked

    def _attempt(self, timeout: float | None) -> bool:
        """Ask the sender to send now, and wait until it has tried; return False if that takes longer."""
        number = self._ask()
        with self._attempts:
            return self._attempts.wait_for(lambda: self._num_answered >= number, timeout)

    def _receive(self, outcome: Outcome) -> None:
        """Take the outcome of an attempt; the sender calls this on its thread."""
        self.run = outcome.run or self.run
        self._position = outcome.position
        self.num_lost += outcome.num_refused
        if outcome.unusable:
            self._set_unusable(UnusableStoreError(outcome.unusable))
        elif outcome.error:
            self._report_away(outcome.error)
        else:
            with self._lock:
                sent = set(map(id, self._asked_to_send.get(outcome.number, ())))
                self._in_memory = [entry for entry in self._in_memory if id(entry) not in sent]
            self._report_return()
        with self._attempts:
            if not outcome.error:
                self._asked_to_send = {n: sent for n, sent in self._asked_to_send.items() if n > outcome.number}
            self._num_answered = max(self._num_answered, outcome.number)
            self._attempts.notify_all()

    def _set_unusable(self, error: UnusableStoreError) -> None:
        """Record that the run cannot be used; if training goes on already, it does so without MLflow."""
        if self._unusable is None and self.is_away:
            rank_zero_warn(f"{error} Training goes on, and what it logs is kept in {self.path}.")
        self._unusable = error

    def _report_away(self, reason: str) -> None:
        if not self.is_away:
            self.is_away = True
            self._away_since = monotonic()
            rank_zero_warn(
                f"MLflow at {self.identity.tracking_uri} cannot be reached ({_one_line(reason)}). Training goes on."
                f" What it logs is kept in {self.path}, and sent when MLflow is back. {_how_to_send(self._folder)}"
            )

    def _report_return(self) -> None:
        if self.is_away:
            self.is_away = False
            rank_zero_info(
                f"MLflow at {self.identity.tracking_uri} is back after {monotonic() - self._away_since:.0f} s, and has"
                " everything that was logged."
            )


class _LazyClient:
    """Make MLflow's client when it is first used, since its import takes a second, and few trainings use it."""

    def __init__(self, tracking_uri: str) -> None:
        self._tracking_uri = tracking_uri

    @cached_property
    def _client(self) -> MlflowClient:
        return connect(self._tracking_uri)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _how_to_send(folder: Path) -> str:
    return f"To send it after the run: lightning-dist sync {folder}"


def _one_line(text: Any, length: int = 200) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= length else line[:length] + "..."
