"""Read runs and the histories of their metrics from an MLflow store."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_dist.cli.compare.measures import is_compared
from lightning_dist.cli.errors import closest
from lightning_dist.run.runs_table import STRATEGY
from lightning_dist.run.tracking_uri import SQLITE, absolute_uri, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Metric
    from mlflow.entities import Run as StoredRun

_REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
"""MLflow's own limits let a call to a server that is down wait for minutes."""

_COMPARED_STATUSES = ("FINISHED", "RUNNING")
_EVALUATION = "dist.task"
"""The parameter of a run that began with an evaluation."""
_TRAINED = "dist.batch_per_rank"
"""The parameter of a run that has trained, also after an evaluation."""
_LARGEST = 1e308
"""SQL stores hold infinity as the largest float."""

_MAX_LISTED = 8
_OWN_TAGS = ("mlflow.", "lightning_dist.", STRATEGY)


class Series(NamedTuple):
    """Hold the values of a metric, one per step, in the order of steps.

    Args:
        steps: The step of each value, increasing.
        seconds: The time of each value since the first metric of the run.
        values: The value of the metric at each step.
    """

    steps: list[int]
    seconds: list[float]
    values: list[float]


@dataclass(frozen=True)
class Run:
    """Describe a run as the store holds it.

    Args:
        id: The run's ID in MLflow.
        name: The run's name in MLflow, which need not be unique.
        experiment_id: ID of the run's experiment.
        experiment: Name of the run's experiment.
        status: ``FINISHED``, ``RUNNING``, ``FAILED``, ``KILLED`` or ``SCHEDULED``.
        started: When the run started, in local time.
        duration: Seconds from the start to the end; None if the run has not ended.
        params: The logged parameters by their dotted names.
        tags: The tags, without those that MLflow and the logger set for themselves.
        series: The histories of the metrics that are compared.
    """

    id: str
    name: str
    experiment_id: str
    experiment: str
    status: str
    started: datetime
    duration: float | None
    params: Mapping[str, str]
    tags: Mapping[str, str]
    series: Mapping[str, Series]


class Selection(NamedTuple):
    """Hold the runs to compare.

    Args:
        runs: The runs, in the order in which they were named, else in the order of their starts.
        num_left_out: Number of runs of the experiment that were not named, and have failed, were stopped, or only
            evaluated a model.
    """

    runs: list[Run]
    num_left_out: int


def read_runs(tracking_uri: str, wanted: Sequence[str] = (), experiment: str | None = None) -> Selection:
    """Read runs from a store.

    Args:
        tracking_uri: URI of the store.
        wanted: For each run its ID, a prefix of its ID or its name; empty: all trainings of the experiment that have
            finished or are running.
        experiment: Name or ID of the experiment; None: any experiment for runs that are named, else the only one that
            has runs.

    Raises:
        ValueError: If the store cannot be read, or if it does not have the runs.
    """
    if tracking_uri.startswith(SQLITE) and not sqlite_file(tracking_uri).is_file():
        raise ValueError(
            f"--tracking-uri={tracking_uri!r}: there is no file {sqlite_file(tracking_uri).resolve()}. Give the URI of "
            "the store that the runs were logged to, or call the command in the folder of its mlflow.db."
        )
    with _reported(tracking_uri):
        client = _connect(tracking_uri)
        experiments = _all_pages(lambda token: client.search_experiments(page_token=token))
    if experiment is not None:
        experiments = [_named_experiment(experiments, experiment, tracking_uri)]
    with _reported(tracking_uri):
        num_left_out = 0
        if wanted:
            found = [_find(client, experiments, word, tracking_uri) for word in wanted]
            found = list({run.info.run_id: run for run in found}.values())
        else:
            chosen = experiments[0] if experiment is not None else _only_experiment(client, experiments, tracking_uri)
            every = _search(client, [chosen])
            found = [run for run in every if run.info.status in _COMPARED_STATUSES and _is_training(run)]
            num_left_out = len(every) - len(found)
            if not found:
                raise ValueError(
                    f"the experiment {chosen.name!r} in {tracking_uri} has no run that has finished or is running"
                    + (f"; others can be named:{_listed(every)}" if every else ".")
                )
        names = {experiment.experiment_id: experiment.name for experiment in experiments}
        return Selection([_read(client, run, names) for run in found], num_left_out)


def _connect(tracking_uri: str) -> "MlflowClient":
    for name, value in _REQUEST_LIMITS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(absolute_uri(tracking_uri))


@contextmanager
def _reported(tracking_uri: str) -> Iterator[None]:
    """Turn errors of the store in this context into a ValueError of one line."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError, ImportError) as error:
        cause = " ".join(str(error).split("\n[SQL:")[0].split())
        raise ValueError(
            f"--tracking-uri={tracking_uri!r}: the store cannot be read: {cause}\n"
            "  Check that the server is up, or give the URI of another store."
        ) from error


def _all_pages(call: Callable[[str | None], Any]) -> list[Any]:
    """Return the items of all pages of a search, which is called with the token of each page."""
    items: list[Any] = []
    token = None
    while True:
        page = call(token)
        items += page
        token = page.token
        if not token:
            return items


def _search(client: "MlflowClient", experiments: Sequence["Experiment"], condition: str = "") -> list["StoredRun"]:
    """Return the runs of experiments that meet a condition, in the order of their starts."""
    ids = [experiment.experiment_id for experiment in experiments]
    return _all_pages(
        lambda token: client.search_runs(ids, condition, order_by=["attributes.start_time ASC"], page_token=token)
    )


def _named_experiment(experiments: Sequence["Experiment"], name: str, tracking_uri: str) -> "Experiment":
    for attribute in ("name", "experiment_id"):
        for experiment in experiments:
            if getattr(experiment, attribute) == name:
                return experiment
    names = [experiment.name for experiment in experiments]
    raise ValueError(
        f"--experiment={name!r}: {tracking_uri} has no such experiment{closest(name, names)} "
        f"It has {_enumerate(names)}."
    )


def _only_experiment(client: "MlflowClient", experiments: Sequence["Experiment"], tracking_uri: str) -> "Experiment":
    """Return the only experiment that has runs."""
    used = [experiment for experiment in experiments if client.search_runs([experiment.experiment_id], max_results=1)]
    if not used:
        raise ValueError(
            f"--tracking-uri={tracking_uri!r}: the store has no runs. Log one with `lightning-dist fit`, or give the "
            "URI of another store."
        )
    if len(used) > 1:
        names = _enumerate([experiment.name for experiment in used])
        raise ValueError(f"{tracking_uri} has several experiments: name runs, or give --experiment one of {names}.")
    return used[0]


def _is_training(run: "StoredRun") -> bool:
    return _EVALUATION not in run.data.params or _TRAINED in run.data.params


def _find(client: "MlflowClient", experiments: Sequence["Experiment"], word: str, tracking_uri: str) -> "StoredRun":
    """Return the run whose name or ID is ``word``, or whose ID begins with it."""
    conditions = [f"attributes.run_name = {_quoted(word)}"]
    if re.fullmatch("[0-9a-f]+", word):
        conditions.append(f"attributes.run_id LIKE '{word}%'")
    by_id = {run.info.run_id: run for condition in conditions for run in _search(client, experiments, condition)}
    matches = [by_id[word]] if word in by_id else list(by_id.values())
    if len(matches) == 1:
        return matches[0]
    where = f"the experiment {experiments[0].name!r} of {tracking_uri}" if len(experiments) == 1 else tracking_uri
    if matches:
        raise ValueError(f"RUN={word!r} is ambiguous in {where}: give the start of the ID of one:{_listed(matches)}")
    every = _search(client, experiments)
    names = {run.info.run_name for run in every}
    has = f" It has:{_listed(every)}" if every else " It has no runs."
    raise ValueError(f"RUN={word!r}: {where} has no such run{closest(word, names)}{has}")


def _quoted(word: str) -> str:
    """Return a word as a string of MLflow's filter language, which has no escapes."""
    if "'" in word and '"' in word:
        raise ValueError(f"RUN={word!r}: MLflow cannot search for a name with both kinds of quotes: give the run's ID.")
    return f'"{word}"' if "'" in word else f"'{word}'"


def _listed(runs: Sequence["StoredRun"]) -> str:
    """Return a list of runs for an error, a line for each."""
    lines = [
        f"\n  {run.info.run_id}  {run.info.run_name}  {run.info.status}  started {_local(run):%Y-%m-%d %H:%M:%S}"
        for run in runs[-_MAX_LISTED:]
    ]
    more = len(runs) - len(lines)
    return "".join(lines) + (f"\n  and {more} earlier ones" if more else "")


def _enumerate(names: Sequence[str]) -> str:
    more = [] if len(names) <= _MAX_LISTED else [f"{len(names) - _MAX_LISTED} more"]
    return ", ".join([*(repr(name) for name in names[:_MAX_LISTED]), *more])


def _local(run: "StoredRun") -> datetime:
    return datetime.fromtimestamp((run.info.start_time or 0) / 1000, UTC).astimezone()


def _read(client: "MlflowClient", run: "StoredRun", experiments: Mapping[str, str]) -> Run:
    info = run.info
    histories = {name: client.get_metric_history(info.run_id, name) for name in run.data.metrics if is_compared(name)}
    first_ms = min((metric.timestamp for history in histories.values() for metric in history), default=0)
    return Run(
        id=info.run_id,
        name=info.run_name or info.run_id[:8],
        experiment_id=info.experiment_id,
        experiment=experiments[info.experiment_id],
        status=info.status,
        started=_local(run),
        duration=None if info.end_time is None else (info.end_time - info.start_time) / 1000,
        params=dict(run.data.params),
        tags={key: value for key, value in run.data.tags.items() if not key.startswith(_OWN_TAGS)},
        series={name: _series(history, first_ms) for name, history in histories.items() if history},
    )


def _series(history: Sequence["Metric"], first_ms: int) -> Series:
    """Return the values of a history, of each step the last; a run that was resumed has logged some steps again."""
    last = {metric.step: metric for metric in sorted(history, key=attrgetter("timestamp"))}
    points = [last[step] for step in sorted(last)]
    return Series(
        steps=[metric.step for metric in points],
        seconds=[(metric.timestamp - first_ms) / 1000 for metric in points],
        values=[_value(metric.value) for metric in points],
    )


def _value(stored: float) -> float:
    return stored if abs(stored) < _LARGEST else stored * 10
