"""Compare the losses of several runs in MLflow, step by step, and exit with code 1 if they differ.

Example:
    python -m examples.from_ddp.same_losses ddp hybrid_shard --tolerance 1e-4
"""

import argparse
import sys

from mlflow import MlflowClient
from mlflow.entities import Run

LOSSES = ("train/loss", "val/loss")


def newest_run(client: MlflowClient, name: str) -> Run:
    """Return the newest run that is called ``name``.

    Raises:
        ValueError: If there is no such run.
    """
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, f"attributes.run_name = '{name}'", order_by=["start_time DESC"])
    if not runs:
        raise ValueError(f"MLflow has no run that is called {name!r}: train it first.")
    return runs[0]


def losses_of(name: str, uri: str) -> dict[tuple[str, int], float]:
    """Return the losses of the newest run that is called ``name``, by metric and step.

    Args:
        name: Name of the run.
        uri: Address of the MLflow store.

    Raises:
        ValueError: If there is no such run, or if it has logged no loss.
    """
    client = MlflowClient(uri)
    run_id = newest_run(client, name).info.run_id
    losses = {
        (metric, point.step): point.value for metric in LOSSES for point in client.get_metric_history(run_id, metric)
    }
    if not losses:
        raise ValueError(f"The run {name!r} has logged none of {', '.join(LOSSES)}.")
    return losses


def difference(reference: dict[tuple[str, int], float], other: dict[tuple[str, int], float]) -> float:
    """Return the largest absolute difference of two runs' losses, which must have been logged at the same steps.

    Raises:
        ValueError: If one of the runs has a loss at a step where the other one has none.
    """
    if missing := sorted(reference.keys() ^ other.keys()):
        raise ValueError(f"Only one of two runs has logged {missing[0][0]} at step {missing[0][1]}.")
    return max(abs(reference[key] - other[key]) for key in reference)


def main() -> int:
    """Compare each run with the first one, print the differences, and return 1 if one is above the tolerance."""
    parser = argparse.ArgumentParser("python -m examples.from_ddp.same_losses")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names of runs, of which the first is the reference")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest accepted difference, in nats (1e-4)")
    parser.add_argument("--tracking-uri", default="sqlite:///mlflow.db", help="MLflow store (sqlite:///mlflow.db)")
    options = parser.parse_args()
    try:
        reference = losses_of(options.runs[0], options.tracking_uri)
        differences = {name: difference(reference, losses_of(name, options.tracking_uri)) for name in options.runs[1:]}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, value in differences.items():
        print(f"{name}: {len(reference)} losses differ from those of {options.runs[0]} by at most {value:.1e}")
    if wrong := [name for name, value in differences.items() if not value <= options.tolerance]:
        print(f"error: {', '.join(wrong)}: a loss differs by more than {options.tolerance:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
