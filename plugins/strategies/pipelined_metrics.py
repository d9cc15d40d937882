"""Torchmetrics under a pipeline: only the last stage updates them, and every rank has their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_dist.pipeline import Pipeline

__all__ = ["SharedMetrics"]

_OWN = "_lightning_dist_own"


class SharedMetrics:
    """Those of ``module``. Outside of a step, to compute one is a collective, as it is anyway where data is split.

    Args:
        module: The user's module.
        pipeline: Whose last stage has the metrics' states.
    """

    def __init__(self, module: LightningModule, pipeline: Pipeline) -> None:
        self._module = module
        self._pipeline = pipeline
        self._in_step = False
        self._of_batch: dict[int, Metric] = {}  # by id: a metric's hash changes with its state
        inner = {id(part) for metric in self._metrics() for part in metric.modules() if part is not metric}
        for metric in self._metrics():
            if id(metric) not in inner:  # the one around it computes it
                own = getattr(metric.compute, _OWN, metric.compute)  # of a run before
                vars(metric)["compute"] = self._shared(own)
                setattr(vars(metric)["compute"], _OWN, own)
                own = getattr(metric.forward, _OWN, metric.forward)
                vars(metric)["forward"] = self._observed(metric, own)
                setattr(vars(metric)["forward"], _OWN, own)

    def _metrics(self) -> list[Metric]:
        return [metric for metric in self._module.modules() if isinstance(metric, Metric)]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside, only the last stage may compute a metric: its ``forward`` does."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    def value_of_batch(self, metric: Metric) -> Any:
        """Of all microbatches of the step that has run, where ``metric`` was called in it; else None."""
        of_batch = self._of_batch.get(id(metric))
        if of_batch is None or not of_batch.update_called:
            return None
        value = of_batch.compute()
        of_batch.reset()
        return value

    def _observed(self, metric: Metric, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._in_step:
                if id(metric) not in self._of_batch:
                    self._of_batch[id(metric)] = self._copied(metric)
                self._of_batch[id(metric)].update(*args, **kwargs)
            return forward(*args, **kwargs)

        return observed

    def _copied(self, metric: Metric) -> Metric:
        """A metric of the same kind, without data, of this rank alone."""
        ours = {key: vars(metric).pop(key) for key in ("compute", "forward", "process_group")}
        try:
            vars(metric).update(compute=getattr(ours["compute"], _OWN), process_group=None)
            copy = metric.clone()
        finally:
            vars(metric).update(ours)
        copy.sync_on_compute = copy._to_sync = False
        copy.reset()
        return copy

    def _shared(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        pipeline = self._pipeline

        @wraps(compute)
        def shared(*args: Any, **kwargs: Any) -> Any:
            if self._in_step:
                return compute(*args, **kwargs)
            value = [apply_to_collection(compute(*args, **kwargs), Tensor, Tensor.cpu) if pipeline.is_last else None]
            dist.broadcast_object_list(value, group=pipeline.group, group_src=pipeline.last_rank)
            return apply_to_collection(value[0], Tensor, Tensor.to, self._module.device)

        return shared
