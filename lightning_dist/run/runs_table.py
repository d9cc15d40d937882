"""Choose the columns of MLflow's table of runs, without importing MLflow, torch or Lightning."""

import json

__all__ = ["STRATEGY", "TAG", "VIEW", "state"]

VIEW = "strategies"
"""The name of the view, which an address of MLflow's web interface gives as ``viewStateShareKey``."""

TAG = f"mlflow.sharedViewState.{VIEW}"
"""The tag of an experiment in which MLflow's web interface looks the view up."""

STRATEGY = "run.strategy"
"""The tag of a run that says how it is spread over devices, also if the user has named the run otherwise."""

_METRICS = ("train/loss", "train_loss", "val/loss", "val_loss", "perf/samples_per_s", "perf/tokens_per_s")


def state() -> str:
    """Return the value of the tag: columns for the strategy, the losses and the speed of each run.

    MLflow leaves out the columns of metrics that no run has.
    """
    return json.dumps({"selectedColumns": [f"tags.`{STRATEGY}`", *(f"metrics.`{name}`" for name in _METRICS)]})
