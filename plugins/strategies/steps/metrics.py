"""Run torchmetrics under a pipeline, where only the last stage updates them and every rank gets their values."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_dist.mesh.consensus import OtherRankError
from lightning_dist.mesh.objects import broadcast_object
from lightning_dist.plugins import _compat
from lightning_dist.techniques.pipeline import Pipeline

__all__ = ["SharedMetrics"]

_OWN = "_lightning_dist_own"
"""Attribute of a replaced method that holds the metric's own method."""


class _ObservedForward:
    """Replace the forward of a metric, so that ``shared`` is given its arguments.

    A deep copy of this object is the forward of the metric's copy.

    Args:
        shared: Object whose :meth:`SharedMetrics.forward` is called instead.
        metric: The metric whose forward is replaced.
        own: The metric's own forward, bound to it.
    """

    def __init__(self, shared: SharedMetrics, metric: Metric, own: Callable[..., Any]) -> None:
        self._shared, self._metric = shared, metric
        setattr(self, _OWN, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._shared.forward(self._metric, getattr(self, _OWN), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self._metric))
        if not isinstance(copy, Metric):
            return self
        self._shared.was_copied(copy)
        return _ObservedForward(self._shared, copy, partial(type(copy).forward, copy))


class SharedMetrics:
    """Let all ranks of a pipeline compute the metrics of ``module``, whose states only the last stage has.

    Outside of a step, ``compute`` of a metric is a collective over the pipeline, and, as without a pipeline, over the
    data-parallel ranks.

    Args:
        module: The user's module; ``compute`` and ``forward`` of the metrics in it are replaced.
        pipeline: The pipeline that runs the module.
    """

    def __init__(self, module: LightningModule, pipeline: Pipeline) -> None:
        self._module = module
        self._pipeline = pipeline
        self._in_step = False
        self._is_undone = False
        # Both are keyed by id: _of_batch by the id of a metric, whose hash changes with its state, and _returned_values
        # by the id of a tensor.
        self._of_batch: dict[int, Metric] = {}
        self._returned_values: dict[int, tuple[Tensor, Metric, str | None, bool]] = {}
        self._copies: list[Metric] = []
        _refuse_hidden_metrics(module)
        self._is_computing = False
        inner = {id(part) for metric in self._metrics() for part in metric.modules() if part is not metric}
        for metric in self._metrics():
            self._share(metric, is_inner=id(metric) in inner)

    def _share(self, metric: Metric, is_inner: bool = False) -> None:
        """Let the ranks of the pipeline compute ``metric`` together.

        Args:
            metric: A metric in the module, or a copy of one that the user has made.
            is_inner: Whether it is inside another metric, which runs its ``forward`` and computes it.
        """
        own = getattr(metric.compute, _OWN, metric.compute)  # A previous run may have replaced it already.
        vars(metric)["compute"] = self._shared(metric, own)
        setattr(vars(metric)["compute"], _OWN, own)
        if is_inner:
            return
        own = getattr(metric.forward, _OWN, metric.forward)
        vars(metric)["forward"] = _ObservedForward(self, metric, own)

    def _metrics(self) -> list[Metric]:
        return [metric for metric in self._module.modules() if isinstance(metric, Metric)]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let the last stage alone compute metrics in this context, in which their ``forward`` calls ``compute``."""
        before, self._in_step = self._in_step, True
        while self._copies:
            self._share(self._copies.pop())
        for of_batch in self._of_batch.values():
            of_batch.reset()
        self._returned_values.clear()
        try:
            yield
        finally:
            self._in_step = before

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore at the end of this context the states that metrics had at its start."""
        kept = [(metric, _compat.metric_state(metric)) for metric in self._metrics()]
        before, self._is_undone = self._is_undone, True
        try:
            yield
        finally:
            self._is_undone = before
            for metric, state in kept:
                _compat.set_metric_state(metric, state)

    def value_of_batch(self, metric: Metric) -> Any:
        """Return the value of ``metric`` over all microbatches of the last step; None if the step has not called it."""
        of_batch = self._of_batch.get(id(metric))
        return None if of_batch is None or not of_batch.update_called else of_batch.compute()

    def source_of(self, value: Any) -> Callable[[], Any] | None:
        """Return a function that computes the whole batch's value of the metric that returned ``value`` in a step.

        Args:
            value: A value that is logged in a step.

        Returns:
            The function, or None if no metric returned ``value``.
        """
        if not isinstance(value, Tensor) or id(value) not in self._returned_values:
            return None
        _, metric, key, is_computed = self._returned_values[id(value)]

        def of_batch() -> Any:
            found = self.value_of_batch(metric)
            return found if key is None else found[key]

        # The value that compute() returned for the last microbatch covers the previous microbatches as well.
        return (lambda: value) if is_computed else of_batch

    def _keep(self, metric: Metric, value: Any, is_computed: bool) -> None:
        """Remember that ``metric`` returned ``value``, keyed by the identity of its tensors."""
        for key, tensor in value.items() if isinstance(value, Mapping) else ((None, value),):
            if isinstance(tensor, Tensor):
                self._returned_values[id(tensor)] = (tensor, metric, key, is_computed)

    def forward(self, metric: Metric, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``metric``, whose forward is ``own``; in a step, also update a copy of it that covers the whole batch."""
        if not self._in_step or self._is_undone:
            return own(*args, **kwargs)
        if id(metric) not in self._of_batch:
            self._of_batch[id(metric)] = self._copied(metric)
        self._of_batch[id(metric)].update(*args, **kwargs)
        value = own(*args, **kwargs)
        self._keep(metric, value, is_computed=False)
        return value

    def was_copied(self, copy: Metric) -> None:
        """Record a copy that the user has made of a metric, for example by ``metric.clone()``."""
        self._copies.append(copy)

    def _copied(self, metric: Metric) -> Metric:
        """Return a copy of ``metric`` without data, which is computed on this rank alone."""
        ours = {key: vars(metric).pop(key) for key in ("compute", "forward", "process_group")}
        try:
            vars(metric).update(compute=getattr(ours["compute"], _OWN), process_group=None)
            copy = metric.clone()
        finally:
            vars(metric).update(ours)
        _compat.compute_alone(copy)
        copy.reset()
        return copy

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute metrics on this rank alone in this context, so that a metric may compute the metrics inside it."""
        before, self._is_computing = self._is_computing, True
        try:
            yield
        finally:
            self._is_computing = before

    def _shared(self, metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``compute`` for ``metric`` that runs on the last stage and broadcasts its value to the others."""
        pipeline = self._pipeline

        @wraps(compute)
        def shared(*args: Any, **kwargs: Any) -> Any:
            if self._in_step or self._is_computing:
                is_inner = self._is_computing
                with self._computing():
                    value = compute(*args, **kwargs)
                if not is_inner:
                    self._keep(metric, value, is_computed=True)
                return value
            value, error = None, None
            if pipeline.is_last:
                try:
                    with self._computing():
                        value = apply_to_collection(compute(*args, **kwargs), Tensor, Tensor.cpu)
                    pickle.dumps(value)  # An error in the broadcast would leave the other ranks waiting.
                except Exception as raised:  # The other ranks wait for the broadcast, so they are told of the error.
                    value, error = None, raised
            told = value, None if error is None else f"{type(error).__name__}: {error}"
            value, failed = broadcast_object(told, pipeline.group, pipeline.last_rank)
            if failed is not None:
                raise error or OtherRankError(f"The last stage could not compute {type(metric).__name__}: {failed}")
            return apply_to_collection(value, Tensor, Tensor.to, self._module.device)

        return shared


def _refuse_hidden_metrics(module: LightningModule) -> None:
    """Refuse metrics in plain lists and dicts, because such metrics are not submodules.

    Raises:
        ValueError: If a module has such metrics.
    """
    known = set(map(id, module.modules()))
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            held = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            if not key.startswith("_") and any(isinstance(item, Metric) and id(item) not in known for item in held):
                raise ValueError(
                    f"self.{name + '.' if name else ''}{key} is a {type(value).__name__} of metrics. Under a pipeline"
                    " only the last stage updates a metric, and the other ranks have to know it as a submodule: use"
                    " torch.nn.ModuleDict, torch.nn.ModuleList or torchmetrics.MetricCollection."
                )
