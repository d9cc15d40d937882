"""Send what processes that have ended left in their spools."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dist.plugins.loggers.delivery import Delivery
from lightning_dist.plugins.loggers.run_identity import OpenRun, RunIdentity, is_newest_start, last_steps, open_run
from lightning_dist.plugins.loggers.spool import Entry, Spool, SpoolInUseError, find_spools
from lightning_dist.plugins.loggers.store import connect

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["Synced", "send_leftovers", "sync"]

_ENDS_WITHIN_S = 2.0
"""Time in seconds within which the process that sends has noticed that its training was killed."""


@dataclass
class Synced:
    """Report on one spool.

    Args:
        path: Path of the spool's file.
        status: ``"sent"``, ``"in use"`` (by a running process, which sends it), or ``"failed"``.
        num_metrics: Number of values of metrics that were sent.
        run_id: ID of the run; empty if it is not known.
        tracking_uri: URI of the store.
        error: Reason for the failure; empty if there was none.
        refused: Entries, as text, that the store refused because of their content.
    """

    path: str
    status: str
    num_metrics: int = 0
    run_id: str = ""
    tracking_uri: str = ""
    error: str = ""
    refused: tuple[str, ...] = ()


def send_leftovers(client: MlflowClient, run: OpenRun, training: str, folder: Path, own: Path) -> None:
    """Send what earlier processes of a training have left in a folder, except the entries that would end the run.

    The last steps of ``run`` are updated.

    Args:
        client: A client of the store.
        run: The run of the training, which is open.
        training: ID of the training.
        folder: Folder of the spools.
        own: The spool of this process, which is left out.

    Raises:
        Exception: If the store cannot be reached.
    """
    for path in find_spools(folder):
        if path == own or training[:12] not in path.name:
            continue
        try:
            spool = _opened(path)
        except (SpoolInUseError, ValueError, OSError):  # A process that is still ending sends its own spool.
            continue
        try:
            if spool.header.get("training") == training:
                _send(spool, Delivery(client, run, _identity(spool).step or 0, compares_histories=True), ends_run=False)
                spool.remove()
                run.last_steps = last_steps(client.get_run(run.run_id))
        finally:
            if path.exists():
                spool.close()


def _opened(path: Path) -> Spool:
    """Open a spool; if it is in use, wait for a moment for a process that has not ended yet after its training."""
    deadline = time.monotonic() + _ENDS_WITHIN_S
    while True:
        try:
            return Spool(path)
        except SpoolInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def sync(path: Path, tracking_uri: str | None = None) -> Synced:
    """Send a spool to the store that it belongs to, and remove it.

    Args:
        path: Path of the spool's file.
        tracking_uri: URI of the store; None: the one that the run was started with.
    """
    result = Synced(str(path), "failed")
    try:
        spool = Spool(path)
    except SpoolInUseError as error:
        return Synced(str(path), "in use", error=str(error))
    except (ValueError, OSError) as error:
        result.error = str(error)
        return result
    try:
        identity = _identity(spool)
        result.tracking_uri = tracking_uri or identity.tracking_uri
        client = connect(result.tracking_uri)
        run = open_run(client, identity, is_first_try=False)
        result.run_id = run.run_id
        delivery = Delivery(client, run, identity.step or 0, compares_histories=True)
        _send(spool, delivery, is_newest_start(run, identity))
        result.num_metrics, result.refused = delivery.num_metrics, tuple(delivery.refused)
    except Exception as error:
        result.error = _reason(error, result.tracking_uri)
        spool.close()
        return result
    spool.remove()
    result.status = "sent"
    return result


def _reason(error: Exception, tracking_uri: str) -> str:
    text = str(getattr(error, "message", None) or error)
    if "Max retries exceeded" in text:  # The error of urllib3, which MLflow passes on as text.
        return f"{tracking_uri} does not answer. Start this server, or give the URI of another one (--tracking-uri)."
    return text


def _identity(spool: Spool) -> RunIdentity:
    return RunIdentity(**spool.header)


def _send(spool: Spool, delivery: Delivery, ends_run: bool) -> None:
    while not spool.is_empty:
        entries, position = spool.pending()
        delivery.send([entry for entry in entries if ends_run or not _is_end(entry)])
        spool.sent(position)


def _is_end(entry: Entry) -> bool:
    return "end" in entry
