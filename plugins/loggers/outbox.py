"""Take what a run logs from the training thread, and send it to MLflow in the background."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.plugins.loggers.delivery import Delivery
from lightning_dist.plugins.loggers.leftovers import send_leftovers
from lightning_dist.plugins.loggers.run_identity import OpenRun, RunIdentity, open_run
from lightning_dist.plugins.loggers.spool import SUFFIX, Entry, Spool
from lightning_dist.plugins.loggers.store import UnusableStoreError, connect, is_local

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
    take the core of the training thread. Another thread sends what is there every few seconds, in few calls. While
    MLflow cannot be reached, it goes on trying. MLflow's own asynchronous logging cannot be used for this: it forgets
    what it could not send, sends in any order, and holds ten threads. As all calls are made on a background thread,
    Ctrl-C, which Python raises in the main thread, cannot interrupt a transaction, which would leave an SQLite database
    locked.

    Args:
        identity: The run, which is opened on the background thread.
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
        self.client: MlflowClient | None = None
        self.run = run
        self.is_away = False
        self.num_lost = 0
        self.path = folder / f"{identity.started_at}-{identity.training[:12]}{SUFFIX}"
        self.identity = identity
        self._folder = folder
        self._connect_timeout = connect_timeout
        self._spool: Spool | None = None
        self._delivery: Delivery | None = None
        self._in_memory: list[Entry] = []
        self._lock = threading.Lock()  # It guards the spool's creation, and the entries in memory.
        self._incoming: deque[Entry | Callable[[], Entry] | threading.Event] = deque()
        self._writes_now = threading.Event()
        self._must_write_soon = False
        self._attempts = threading.Condition()
        self._num_asked = self._num_answered = 0
        self._is_closing = False
        self._has_tried = False
        self._unusable: UnusableStoreError | None = None
        self._warned_of_disk = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, and wait until the run is open or MLflow turns out to be away.

        Raises:
            UnusableStoreError: If the given run or experiment cannot be used, or the URI is not accepted.
        """
        for target in (self._write, self._send):
            thread = threading.Thread(target=target, name=f"mlflow{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self.close)
        # Creating an SQLite database takes seconds, and needs no connection.
        timeout = None if is_local(self.identity.tracking_uri) else self._connect_timeout
        if not self._attempt(timeout):
            self._report_away(f"it has not answered within connect_timeout={self._connect_timeout:g} s")
        if self._unusable is not None and self.run is None:
            self.close()
            raise self._unusable

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
        """Send what is left, and end the threads. What MLflow has not got stays in the spool."""
        atexit.unregister(self.close)
        if self._is_closing:
            return
        self.flush()
        self._is_closing = True
        self._writes_now.set()
        with self._attempts:
            self._attempts.notify_all()
        for thread in self._threads:
            thread.join()
        self.num_lost += sum(len(entry.get("metrics", ())) for entry in self._in_memory)
        if self._delivery is not None:
            self.num_lost += self._delivery.num_refused_metrics
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
                self._spool = Spool(self.path, self.identity.header())
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

    # The thread that sends

    def _attempt(self, timeout: float | None) -> bool:
        """Ask the thread to send now, and wait until it has tried; return False if that takes longer."""
        with self._attempts:
            self._num_asked += 1
            number = self._num_asked
            self._attempts.notify_all()
            return self._attempts.wait_for(lambda: self._num_answered >= number, timeout)

    def _send(self) -> None:
        pause = self.SEND_EVERY_S
        while True:
            with self._attempts:
                self._attempts.wait_for(lambda: self._is_closing or self._num_asked > self._num_answered, pause)
                if self._is_closing:
                    return
                asked = self._num_asked
            try:
                self._send_all()
            except UnusableStoreError as error:
                self._set_unusable(error)
            except Exception as error:
                pause = min(2 * pause, self.MAX_RETRY_S) if self.is_away else self.FIRST_RETRY_S
                self._report_away(getattr(error, "message", None) or repr(error))
            else:
                pause = self.SEND_EVERY_S
                self._report_return()
            with self._attempts:
                self._num_answered = asked
                self._attempts.notify_all()

    def _send_all(self) -> None:
        """Open the run unless it is open, and send everything that is there.

        Raises:
            UnusableStoreError: If the run or the experiment cannot be used.
            Exception: If MLflow cannot be reached.
        """
        if self._unusable is not None:
            raise self._unusable
        if self.client is None:
            self.client = connect(self.identity.tracking_uri)
        if self._delivery is None:
            is_first_try, self._has_tried = not self._has_tried, True
            run = self.run or open_run(self.client, self.identity, is_first_try)
            send_leftovers(self.client, run, self.identity.training, self._folder, self.path)
            self.run = run
            self._delivery = Delivery(self.client, run, self.identity.step or 0)
        while self._spool is not None and not self._spool.is_empty:
            entries, position = self._spool.pending()
            self._delivery.send(entries)
            self._spool.sent(position)
        with self._lock:
            in_memory = list(self._in_memory)
        self._delivery.send(in_memory)
        with self._lock:
            sent = set(map(id, in_memory))
            self._in_memory = [entry for entry in self._in_memory if id(entry) not in sent]

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


def _how_to_send(folder: Path) -> str:
    return f"To send it after the run: lightning-dist sync {folder}"


def _one_line(text: Any, length: int = 200) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= length else line[:length] + "..."
