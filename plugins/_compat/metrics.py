"""Read and change the state of torchmetrics' metrics, and of Lightning's for logged values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics import metric as metric_module

__all__ = [
    "compute_alone",
    "gather_metrics_over",
    "metric_state",
    "set_batch_value",
    "set_metric_state",
    "update_metrics_apart",
    "weigh_ranks_exactly",
]


def weigh_ranks_exactly(is_ours: Callable[[Any], bool]) -> None:
    """Reduce the numbers of samples of logged means as floats; calling this again is safe.

    Lightning reduces them by a mean of integers, which is rounded towards zero. If ranks have unequal numbers of
    samples, a logged mean would be wrong by the fraction that is cut off. This could be replaced by a sum in Lightning.

    Args:
        is_ours: Function that returns whether a strategy is one for which this holds.
    """
    compute = _ResultMetric.compute
    if hasattr(compute, "__wrapped__"):
        return

    @wraps(compute)
    def exact(self: Any) -> Any:
        is_mean = self.is_tensor and self.meta.is_mean_reduction
        if is_mean and is_ours(getattr(self.meta.sync.fn, "__self__", None)):
            self.cumulated_batch_size = self.cumulated_batch_size.to(self.value.dtype)
        return compute(self)

    _ResultMetric.compute = exact  # type: ignore[method-assign]


def update_metrics_apart(collection: MetricCollection) -> None:
    """Make ``collection`` update each of its metrics, without comparing states to find metrics that can share one.

    This could be replaced by a way to switch off ``compute_groups`` of an existing collection.
    """
    names = list(collection.keys(keep_base=True))
    vars(collection).update(_groups={index: [name] for index, name in enumerate(names)}, _groups_checked=True)


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return a copy of the state that updates of ``metric`` change.

    This could be replaced by a public method of torchmetrics.
    """
    states = {
        key: value.clone() if isinstance(value, torch.Tensor) else list(value)
        for key, value in metric.metric_state.items()
    }
    return states | {key: vars(metric)[key] for key in ("_update_count", "_computed", "_forward_cache")}


def set_metric_state(metric: Metric, state: Mapping[str, Any]) -> None:
    """Restore the state of ``metric`` that :func:`metric_state` returned."""
    vars(metric).update(state)


def set_batch_value(metric: nn.Module, value: Any) -> None:
    """Set the value that ``self.log(name, metric)`` takes as that of the batch.

    This could be replaced by a public method of torchmetrics.
    """
    vars(metric)["_forward_cache"] = value


def compute_alone(metric: Metric) -> None:
    """Let ``metric`` be computed from this rank's data only, also in its ``forward``.

    This could be replaced by a ``sync_on_compute`` of torchmetrics that holds for metrics that exist already.
    """
    metric.distributed_available_fn = _is_alone


def _is_alone() -> bool:
    return False


def gather_metrics_over(ranks: dist.ProcessGroup) -> Callable[[], None]:
    """Let metrics that have no process group of their own gather their states over ``ranks`` instead of all processes.

    This could be replaced by a default process group in torchmetrics.

    Returns:
        A function that restores torchmetrics' default.
    """
    name = "gather_all_tensors"
    own = getattr(metric_module, name)

    def gather(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        gathered: list[torch.Tensor] = own(result, ranks if group is None else group)
        return gathered

    setattr(metric_module, name, gather)
    return lambda: setattr(metric_module, name, own)
