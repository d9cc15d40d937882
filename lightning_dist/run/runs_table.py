"""Choose the columns of MLflow's table of runs, without importing MLflow, torch or Lightning."""

import json

__all__ = ["TAG", "VIEW", "state"]

VIEW = "strategies"
"""The name of the view, which an address of MLflow's web interface gives as ``viewStateShareKey``."""

TAG = f"mlflow.sharedViewState.{VIEW}"
"""The tag of an experiment in which MLflow's web interface looks the view up."""

_PARAMETERS = ("dist.strategy",)
_METRICS = (
    *("train/loss", "train_loss", "val/loss", "val_loss", "perf/tokens_per_s", "perf/samples_per_s", "perf/step_ms"),
    "memory/peak_mib",
)


def state() -> str:
    """Return the value of the tag: the strategy, the losses, and the speed of each run; it has no column for others.

    MLflow leaves out the columns of metrics that no run has.
    """
    columns = [
        "attributes.`Duration`",
        *(f"params.`{name}`" for name in _PARAMETERS),
        *(f"metrics.`{name}`" for name in _METRICS),
    ]
    return json.dumps({"selectedColumns": columns})
