"""Connect to MLflow's store, and keep it from disturbing a training process."""

import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dist.plugins.tracking_uri import SQLITE, absolute_uri, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient


def default_save_dir(tracking_uri: str) -> str:
    """Return the folder of a file store, or else ``mlruns`` beside the SQLite file or in the working directory."""
    if tracking_uri.startswith("file:"):
        return re.sub(r"^file:(//)?", "", tracking_uri)
    if tracking_uri.startswith(SQLITE):
        return str(sqlite_file(tracking_uri).parent / "mlruns")
    return "mlruns"


def connect(tracking_uri: str) -> "MlflowClient":
    """Return a client of the store, and create the store if it is an SQLite file that does not exist.

    Raises:
        ValueError: If MLflow does not accept the URI.
    """
    if tracking_uri.startswith(SQLITE):
        database = sqlite_file(tracking_uri)
        if not database.exists():
            rank_zero_info(f"Creating the MLflow database {database} (once, a few seconds).")
            database.parent.mkdir(parents=True, exist_ok=True)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    with _quiet("alembic", "mlflow.store"):
        try:
            return MlflowClient(absolute_uri(tracking_uri))
        except MlflowException as error:
            raise ValueError(f"MLflowLogger(tracking_uri={tracking_uri!r}): {error.message}") from error


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
