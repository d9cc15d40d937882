"""Write runs into an MLflow store with metrics at chosen steps and times, as a training would log them."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

START_MS = 1_700_000_000_000


def log_run(
    client: MlflowClient,
    experiment: str,
    name: str,
    params: Mapping[str, Any],
    metrics: Mapping[str, Sequence[tuple[int, float, float]]],
    status: str = "FINISHED",
    started: float = 0,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Log a run, and return its ID.

    Args:
        client: Client of the store.
        experiment: Name of the experiment, which is created if it does not exist.
        name: Name of the run.
        params: Parameters by their full names.
        metrics: For each metric its points: step, seconds since the start of the run, value.
        status: How the run has ended, or RUNNING.
        started: Seconds by which the run started later than the first one.
        tags: Tags to set.
    """
    found = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
    start_ms = START_MS + round(1000 * started)
    run_id = client.create_run(experiment_id, start_time=start_ms, run_name=name, tags=tags).info.run_id
    points = [
        Metric(key, value, start_ms + round(1000 * seconds), step)
        for key, history in metrics.items()
        for step, seconds, value in history
    ]
    client.log_batch(run_id, metrics=points, params=[Param(key, str(value)) for key, value in params.items()])
    if status != "RUNNING":
        ended = max((point.timestamp for point in points), default=start_ms)
        client.set_terminated(run_id, status, end_time=ended)
    return run_id
