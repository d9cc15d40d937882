"""Send what is in a spool to MLflow every few seconds, and go on trying while MLflow cannot be reached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dist.plugins.loggers.delivery import Delivery
from lightning_dist.plugins.loggers.leftovers import send_leftovers
from lightning_dist.plugins.loggers.run_identity import OpenRun, RunIdentity, open_run, reopened
from lightning_dist.plugins.loggers.spool import Entry, Spool
from lightning_dist.plugins.loggers.store import UnusableStoreError, connect

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["Job", "Outcome", "Sender"]


@dataclass(frozen=True)
class Job:
    """Say what a sender sends. It is plain data.

    Args:
        identity: Description of the run, by which it is found or created.
        path: The spool, which need not exist yet. What earlier processes of the training have left beside it is sent
            first.
        send_every_s: Time in seconds from one attempt to the next.
        first_retry_s: Time in seconds from the first failed attempt to the next one.
        max_retry_s: Longest time in seconds between two attempts while MLflow cannot be reached.
        run: The run, if it was open before.
        is_first_try: Whether no earlier attempt, of which only the answer may have been lost, can have created the run.
    """

    identity: RunIdentity
    path: Path
    send_every_s: float
    first_retry_s: float
    max_retry_s: float
    run: OpenRun | None = None
    is_first_try: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the job as plain JSON, from which :meth:`from_json` makes an equal one in another process."""
        return {**asdict(self), "identity": self.identity.header(), "path": str(self.path)}

    @classmethod
    def from_json(cls, job: dict[str, Any]) -> Job:
        """Return the job that :meth:`as_json` has described."""
        run = None if job["run"] is None else OpenRun(**job["run"])
        return cls(**{**job, "identity": RunIdentity(**job["identity"]), "path": Path(job["path"]), "run": run})


@dataclass(frozen=True)
class Outcome:
    """Report on an attempt to send everything.

    Args:
        number: Number of the last request that came before the attempt.
        run: The run; None if it could not be opened yet.
        position: Position in the spool up to which MLflow has everything; None if there is no spool.
        num_refused: Number of values of metrics that MLflow has refused in this attempt.
        error: Why MLflow could not be reached; otherwise empty.
        unusable: Why the store, the experiment or the run cannot be used; otherwise empty.
    """

    number: int
    run: OpenRun | None = None
    position: int | None = None
    num_refused: int = 0
    error: str = ""
    unusable: str = ""


class Sender:
    """Open the run of a training, and send what is in its spool, on a background thread.

    Args:
        job: The run, the spool and the times of attempts.
        spool: Function that returns the spool, or None if nothing has been written yet.
        report: Function that is called on the thread with the outcome of every attempt.
    """

    def __init__(self, job: Job, spool: Callable[[], Spool | None], report: Callable[[Outcome], None]) -> None:
        self.client: MlflowClient | None = None
        self._job = job
        self._find_spool = spool
        self._report = report
        self._run = job.run
        self._is_first_try = job.is_first_try
        self._delivery: Delivery | None = None
        self._spool: Spool | None = None
        self._num_refused = 0
        self._unusable: UnusableStoreError | None = None
        self._requests = threading.Condition()
        self._num_asked = self._num_answered = 0
        self._unwritten: Sequence[Entry] = ()
        self._is_closing = False
        self._thread = threading.Thread(target=self._send_until_end, name="mlflow_send", daemon=True)

    def start(self) -> None:
        """Start the thread, which makes its first attempt when it is asked to or after the first pause."""
        self._thread.start()

    def ask(self, number: int, unwritten: Sequence[Entry]) -> None:
        """Ask for an attempt now.

        Args:
            number: Number of the request.
            unwritten: Entries that could not be written to the spool, which are sent after those that were. They
                replace the ones of the request before.
        """
        with self._requests:
            self._num_asked, self._unwritten = number, unwritten
            self._requests.notify_all()

    def close(self) -> None:
        """End the thread after the attempt that it is making."""
        with self._requests:
            self._is_closing = True
            self._requests.notify_all()
        self._thread.join()

    def _send_until_end(self) -> None:
        pause, is_away = self._job.send_every_s, False
        while True:
            with self._requests:
                self._requests.wait_for(lambda: self._is_closing or self._num_asked > self._num_answered, pause)
                if self._is_closing:
                    return
                number, unwritten = self._num_asked, self._unwritten
            outcome = self._attempt(number, unwritten)
            if outcome.error:
                pause = min(2 * pause, self._job.max_retry_s) if is_away else self._job.first_retry_s
            else:
                pause = self._job.send_every_s
                with self._requests:
                    if self._num_asked == number:
                        self._unwritten = ()
            is_away = bool(outcome.error)
            self._num_answered = number
            self._report(outcome)

    def _attempt(self, number: int, unwritten: Sequence[Entry]) -> Outcome:
        error = unusable = ""
        try:
            self._send_all(unwritten)
        except UnusableStoreError as reason:
            self._unusable, unusable = reason, str(reason)
        except Exception as reason:
            error = getattr(reason, "message", None) or repr(reason)
        refused = 0 if self._delivery is None else self._delivery.num_refused_metrics
        newly_refused, self._num_refused = refused - self._num_refused, refused
        position = None if self._spool is None else self._spool.position
        run = None if self._delivery is None else self._run
        return Outcome(number, run, position, newly_refused, error, unusable)

    def _send_all(self, unwritten: Sequence[Entry]) -> None:
        """Open the run unless it is open, and send everything that is there.

        Raises:
            UnusableStoreError: If the run or the experiment cannot be used.
            Exception: If MLflow cannot be reached.
        """
        if self._unusable is not None:
            raise self._unusable
        identity, path = self._job.identity, self._job.path
        if self.client is None:
            self.client = connect(identity.tracking_uri)
        if self._delivery is None:
            is_first_try, self._is_first_try = self._is_first_try, False
            if self._run is None:
                run = open_run(self.client, identity, is_first_try)
            else:
                run = reopened(self.client, self._run)
            send_leftovers(self.client, run, identity.training, path.parent, path)
            self._run = run
            self._delivery = Delivery(self.client, run, identity.step or 0)
        if self._spool is None:
            self._spool = self._find_spool()
        while self._spool is not None and not self._spool.is_empty:
            entries, position = self._spool.pending()
            self._delivery.send(entries)
            self._spool.sent(position)
        self._delivery.send(unwritten)
