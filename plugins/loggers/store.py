"""Connect to MLflow's store, and keep it from disturbing a training process."""

import fcntl
import logging
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dist.run.tracking_uri import SQLITE, absolute_uri, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

    Client = MlflowClient
else:
    Client = Any  # The command parses the annotations of the logger, and would otherwise import mlflow for them.

# MLflow's codes of errors that the same call would have again.
_REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_LIMIT_EXCEEDED",
    "BAD_REQUEST",
    "MALFORMED_REQUEST",
    "INVALID_STATE",
}
_REQUEST_DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""MLflow's client would retry a call for minutes, with a line for each retry, while new metrics wait behind it. The
logger tries again itself."""


class UnusableStoreError(ValueError):
    """Report that the store, the experiment or the run that the user has named cannot be used."""


def default_save_dir(tracking_uri: str) -> str:
    """Return the folder of a file store, or else ``mlruns`` beside the SQLite file or in the working directory."""
    if tracking_uri.startswith("file:"):
        return re.sub(r"^file:(//)?", "", tracking_uri)
    if tracking_uri.startswith(SQLITE):
        return str(sqlite_file(tracking_uri).parent / "mlruns")
    return "mlruns"


def default_spool_dir(save_dir: str) -> Path:
    """Return the folder of spools, which must be a local one."""
    return Path("mlruns" if "://" in save_dir else save_dir, "mlflow-spool")


def is_local(tracking_uri: str) -> bool:
    """Return whether a store is a file of this machine, which is always there."""
    return tracking_uri.startswith((SQLITE, "file:"))


def is_served(tracking_uri: str) -> bool:
    """Return whether a store is a server that is reached by HTTP.

    It does not include Databricks, where a notebook's credentials are those of its process.
    """
    return tracking_uri.startswith(("http://", "https://"))


def missing_database(tracking_uri: str) -> Path | None:
    """Return the SQLite file of a store if it does not exist, so that :func:`connect` would create it."""
    if not tracking_uri.startswith(SQLITE) or sqlite_file(tracking_uri).exists():
        return None
    return sqlite_file(tracking_uri)


def connect(tracking_uri: str) -> Client:
    """Return a client of the store, and create the store if it is an SQLite file that does not exist.

    Raises:
        UnusableStoreError: If MLflow does not accept the URI.
    """
    for name, value in _REQUEST_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if tracking_uri.startswith(SQLITE):
        sqlite_file(tracking_uri).parent.mkdir(parents=True, exist_ok=True)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    with _quiet("alembic", "mlflow.store"), _one_at_a_time(tracking_uri):
        try:
            return MlflowClient(absolute_uri(tracking_uri))
        except MlflowException as error:
            raise UnusableStoreError(f"MLflowLogger(tracking_uri={tracking_uri!r}): {error.message}") from error


def is_refused(error: Exception) -> bool:
    """Return whether the store has refused a call for what it contains, and would do so again."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.error_code in _REFUSALS


@contextmanager
def _one_at_a_time(tracking_uri: str) -> Iterator[None]:
    """Keep other processes from creating the same SQLite database in this context, of which all but one would fail."""
    if not tracking_uri.startswith(SQLITE):
        yield
        return
    folder = os.open(sqlite_file(tracking_uri).resolve().parent, os.O_RDONLY)  # This leaves no file behind.
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def _quiet(*logger_names: str) -> Iterator[None]:
    """Silence loggers below warnings, because they report every step of a database's migration."""
    loggers = [logging.getLogger(name) for name in logger_names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Reseed Python's generator in this context, so that MLflow invents distinct names for runs with the same seed.

    The generator's state is restored afterwards, so that its state on rank 0 does not differ from the other ranks'.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)
