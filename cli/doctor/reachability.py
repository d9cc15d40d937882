"""Check that MLflow answers, and say aloud what is not measured."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec

from lightning_dist.run.doctor.examination import Check, Examination
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.tracking_uri import SQLITE, absolute_uri, chosen_tracking_uri, sqlite_file

__all__ = ["further_checks", "reach"]

_NAME = "MLflow"

SLOW_S = 1.0
"""The logger sends in the background, so that only an answer that takes this long lets it fall behind."""

_REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""MLflow's own limits let a call to a server that is down wait for minutes. The time is the logger's
``connect_timeout``."""


def further_checks(tracking_uri: str | None) -> tuple[Check, ...]:
    """Return the checks that the engine does not have.

    Args:
        tracking_uri: URI of the MLflow store; None: that of the environment, or else the default one.
    """
    uri = chosen_tracking_uri(tracking_uri)

    def check_mlflow(examination: Examination) -> list[Finding]:
        # Only rank 0 logs.
        return examination.ranks.gather([reach(uri)] if examination.ranks.rank == 0 else [])[0]

    return (Check("MLflow", check_mlflow), Check("data loading", _leave_data_out))


def _leave_data_out(examination: Examination) -> list[Finding]:
    return [
        Finding(
            "data loading",
            "skip",
            "The loading of data was not measured, because the command is given no configuration.",
            "perf/data_ms of a run, and `lightning-dist profile`, show whether steps wait for data.",
        )
    ]


def reach(uri: str) -> Finding:
    """Ask a store for an experiment.

    Args:
        uri: URI of the MLflow store.
    """
    if find_spec("mlflow") is None:
        return Finding(
            _NAME, "skip", "MLflow is not installed, so that no run is logged.", 'pip install "lightning-dist[cli]"'
        )
    if uri.startswith(SQLITE) and not sqlite_file(uri).exists():
        return _missing_file(uri)
    for name, value in _REQUEST_LIMITS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    start = time.perf_counter()
    try:
        client = MlflowClient(absolute_uri(uri))
        start = time.perf_counter()
        client.search_experiments(max_results=1)
    except Exception as error:  # The store may be of any kind, each with errors of its own.
        cause = " ".join(str(_root_of(error)).split("\n[SQL:")[0].split())
        return Finding(
            _NAME,
            "fail",
            f"The store {uri} does not answer, after {time.perf_counter() - start:.1f} s: {_shortened(cause)} A run"
            " would keep what it logs in a local file.",
            "Start the server (`mlflow server`), or give another store by --tracking-uri or MLFLOW_TRACKING_URI."
            " `lightning-dist sync` sends what runs have kept meanwhile.",
        )
    seconds = time.perf_counter() - start
    seen = f"The store {uri} answers in {1000 * seconds:.0f} ms."
    if seconds > SLOW_S:
        return Finding(
            _NAME,
            "warn",
            f"{seen} Metrics of a run arrive late then.",
            "Look at the load of the server and its database, and log less often (trainer.log_every_n_steps).",
        )
    return Finding(_NAME, "pass", seen)


def _missing_file(uri: str) -> Finding:
    path = sqlite_file(uri).absolute()
    nearest = next(folder for folder in path.parents if folder.exists())
    if not os.access(nearest, os.W_OK):
        return Finding(
            _NAME,
            "fail",
            f"The store {uri} does not exist, and this user cannot make a file in {nearest}.",
            "Give another store by --tracking-uri or MLFLOW_TRACKING_URI.",
        )
    return Finding(_NAME, "pass", f"The store {uri} does not exist yet. The first run makes the file {path}.")


def _root_of(error: BaseException) -> BaseException:
    """Return the first cause of an error; what clients of HTTP say themselves is mostly about their retries."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def _shortened(text: str) -> str:
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return text if text.endswith(".") else f"{text}."
