"""Say which MLflow store is used, without importing MLflow, torch or Lightning."""

import os
from pathlib import Path

SQLITE = "sqlite:///"
DEFAULT_TRACKING_URI = f"{SQLITE}mlflow.db"


def chosen_tracking_uri(given: str | None = None) -> str:
    """Return the URI that was given, else the environment variable ``MLFLOW_TRACKING_URI``, else the default one."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def absolute_uri(tracking_uri: str) -> str:
    """Return the URI of the same store for any working directory.

    MLflow caches connections by URI, so a relative one would refer to the working directory of its first use.
    """
    if not tracking_uri.startswith(SQLITE):
        return tracking_uri
    _, mark, options = tracking_uri.partition("?")
    return f"{SQLITE}{sqlite_file(tracking_uri).resolve()}{mark}{options}"


def sqlite_file(tracking_uri: str) -> Path:
    """Return the path of the file of a store whose URI begins with :data:`SQLITE`."""
    return Path(tracking_uri.removeprefix(SQLITE).partition("?")[0])
