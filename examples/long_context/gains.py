"""Show what runs on long sequences need in MLflow, and exit with code 1 if they do not need less than the first one.

Example:
    python -m examples.long_context.gains full_shard tiled context_parallel
"""

import argparse
import sys

from mlflow import MlflowClient

from examples.from_ddp.same_losses import losses_of, newest_run

FIGURES = {"memory/activations_mib": max, "memory/peak_of_model_mib": max, "perf/step_ms": min}
"""Metrics that are shown, with the function that chooses one of the logged values."""

LEAST_MIB = 0.5
"""Activations below this number of MiB were not measured: even the input of a single block is larger."""


def figures_of(name: str, uri: str) -> dict[str, float]:
    """Return the figures of a run, and its last validation loss.

    Raises:
        ValueError: If the run does not exist, or has not logged one of them.
    """
    client = MlflowClient(uri)
    run = newest_run(client, name)
    figures = {}
    for metric, choose in FIGURES.items():
        values = [point.value for point in client.get_metric_history(run.info.run_id, metric)]
        if not values:
            raise ValueError(f"The run {name!r} has not logged {metric}.")
        figures[metric] = choose(values)
    figures["val/loss"] = [
        value for (metric, _), value in sorted(losses_of(name, uri).items()) if metric == "val/loss"
    ][-1]
    return figures


def main() -> int:
    """Print the figures of each run, and return 1 if a run has no lower peak than the first one, or another loss."""
    parser = argparse.ArgumentParser("python -m examples.long_context.gains")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names of runs, of which the first is the reference")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest accepted difference of losses (1e-4)")
    parser.add_argument("--tracking-uri", default="sqlite:///mlflow.db", help="MLflow store (sqlite:///mlflow.db)")
    options = parser.parse_args()
    try:
        runs = {name: figures_of(name, options.tracking_uri) for name in options.runs}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'':26}" + "".join(f"{name:>18}" for name in runs))
    for metric in [*FIGURES, "val/loss"]:
        print(f"{metric:26}" + "".join(f"{figures[metric]:18,.4g}" for figures in runs.values()))
    for name, figures in runs.items():
        if figures["memory/activations_mib"] < LEAST_MIB:
            print(
                f"error: {name} seems to keep no activations. On a CPU, train with MALLOC_MMAP_THRESHOLD_=65536,"
                " so that freed memory is returned at once, and cannot be used again unnoticed.",
                file=sys.stderr,
            )
            return 1
    reference, *others = runs.values()
    for name, figures in zip(options.runs[1:], others, strict=True):
        if not abs(figures["val/loss"] - reference["val/loss"]) <= options.tolerance:
            print(f"error: {name} has another val/loss than {options.runs[0]}", file=sys.stderr)
            return 1
        if not figures["memory/peak_of_model_mib"] < reference["memory/peak_of_model_mib"]:
            print(f"error: {name} has no lower peak of memory than {options.runs[0]}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
