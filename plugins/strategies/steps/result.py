"""Merge the outputs, logs and changes of a step on the microbatches, and give them to every rank of the pipeline.

Only the last stage has these results. They are merged so that they equal those of a step on the whole batch.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from inspect import signature as signature_of
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.steps.example_step import without_updates
from lightning_dist.plugins.strategies.steps.metrics import SharedMetrics
from lightning_dist.plugins.strategies.steps.results_broadcast import Results
from lightning_dist.techniques.pipeline import BuffersOfStep, Pipeline, StepOutcome, refuse_stand_ins
from lightning_dist.techniques.pipeline.attributes import restore, save_attributes
from lightning_dist.tracing.step_graph import Leaf, StepGraph, is_object, packages_of

__all__ = ["StepResult", "merge_values", "merged_outputs"]


class _Logged(NamedTuple):
    """Represent a call of ``self.log`` in one microbatch, or the merged calls of all microbatches.

    Args:
        value: The logged value; None for a metric object in a microbatch.
        kwargs: The further arguments of the call, by name.
        num_samples: The number of samples, by which the value is weighted.
        metric: The name of the module that was logged as a metric object; None if a value was logged.
        of_batch: Function that computes the value for the whole batch, if a metric returned the value for the
            microbatch; else None.
    """

    value: Any
    kwargs: dict[str, Any]
    num_samples: int
    metric: str | None = None
    of_batch: Callable[[], Any] | None = None


class StepResult:
    """Collect a step's side effects: what it logs, and the attributes and buffers that it changes.

    If the side effects on microbatches may differ from those on the whole batch, the last stage runs the code between
    parts once more, on the whole batch and on the merged outputs of the parts for all microbatches.

    Args:
        module: The user's module.
        graph: Graph of the step on a microbatch, which names the attributes and buffers that it changes.
        sizes: The number of samples in each microbatch, in order.
        shared: Object that computes the module's metrics for all ranks of the pipeline.
    """

    def __init__(self, module: LightningModule, graph: StepGraph, sizes: Sequence[int], shared: SharedMetrics) -> None:
        self.graph = graph
        self._module = module
        self._shared = shared
        self._sizes = sizes
        self._before = save_attributes(module, graph.changed)
        self._logged: dict[_Call, dict[int, _Logged]] = {}
        self._num_calls: Counter[tuple[str, int]] = Counter()
        self._of_whole_batch: _OfWholeBatch | None = None
        self.microbatch = 0
        """The index of the microbatch on which the step is running."""
        self.is_recorded = True
        """Whether calls of ``self.log`` are recorded. A rank with several stages runs the step once for each of them,
        and records only one of these runs."""

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Record what steps log in this context, each time for the microbatch :attr:`microbatch`."""

        def on_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if not self.is_recorded:
                return
            kwargs = {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **kwargs}
            call = self._call(name, self.microbatch)
            size = None if call in self.graph.fixed_sizes else kwargs.get("batch_size")
            size = size or self._sizes[self.microbatch]
            metric = None
            if isinstance(value, Metric):
                metric = next((path for path, found in self._module.named_modules() if found is value), None)
                if metric is None:
                    raise ValueError(
                        f"self.log({name!r}, ...) was given a {type(value).__name__} that is no attribute of"
                        f" {type(self._module).__name__}: under a pipeline it must be one, so that all ranks know it."
                    )
                value = None
            refuse_stand_ins(value, f"logs as {name!r}")
            self._logged.setdefault(call, {})[self.microbatch] = _Logged(
                _detached(value), kwargs, size, metric, self._shared.source_of(value)
            )

        with _compat.logging_to(self._module, on_log):
            yield

    def _call(self, name: str, microbatch: int) -> _Call:
        """Count a call of ``self.log`` with ``name`` in the step on ``microbatch``, and return its identifier."""
        self._num_calls[name, microbatch] += 1
        return name, self._num_calls[name, microbatch]

    def run_on_whole_batch(self, pipeline: Pipeline, ran: StepOutcome, step: Callable[[], Any]) -> None:
        """Run the code between parts on the whole batch, if the graph has ``of_whole_batch``.

        Only the rank with the last stage may call this.

        Args:
            pipeline: The pipeline that has run the step on the microbatches.
            ran: The outcome of the step on the microbatches.
            step: Function without arguments that runs the user's step on the whole batch.
        """
        whole = self.graph.of_whole_batch
        if whole is None:
            return
        restore(self._module, self.graph.changed, self._before)
        ran.buffers.restore(except_prefixes=tuple(f"{part}." for part in pipeline.stages.parts))
        leaves = zip(pipeline.runner.values_at_end(self.graph), pipeline.runner.values_at_end(whole), strict=True)
        values = [
            _merge_part_output(*known, parts)
            for known, parts in zip(leaves, zip(*ran.part_outputs, strict=True), strict=True)
        ]
        logged: dict[_Call, tuple[Any, Mapping[str, Any]]] = {}
        num_calls: Counter[str] = Counter()

        def on_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            num_calls[name] += 1
            if not isinstance(value, Metric):
                logged[name, num_calls[name]] = _detached(value), kwargs

        metrics = without_updates(self._module, value_of=self._shared.value_of_batch)
        with torch.no_grad(), _compat.logging_to(self._module, on_log), metrics, _WithoutHooks():
            result = pipeline.runner.run_between_parts(whole, values, step)
        self._of_whole_batch = _OfWholeBatch(_detached(result), {call: value for call, (value, _) in logged.items()})

    def output(self, merge: Callable[[bool], Any]) -> Any:
        """Return the step's output for the whole batch. Only the rank with the last stage may call this.

        Args:
            merge: Function that merges the outputs of the microbatches, given whether integers are counts.
        """
        merged = merge(not self.graph.has_fixed_numbers)
        if self._of_whole_batch is None:
            return merged
        whole = self._of_whole_batch.result
        if isinstance(merged, Mapping) and isinstance(whole, Mapping):
            return {**whole, **{key: merged[key] for key in ("loss", "weight") if key in merged}}
        return merged if isinstance(merged, Tensor) else whole

    def left(self, merge: Callable[[bool], Any], buffers: BuffersOfStep) -> Results:
        """Return what the step leaves. Only the rank with the last stage may call this.

        Args:
            merge: Function that merges the outputs of the microbatches, given whether integers are counts.
            buffers: The buffers that the step changes, from the step's outcome.
        """
        logged = {call: self._merged(call, list(calls.values())) for call, calls in self._logged.items()}
        between = {name: value for name, value in buffers.current().items() if name in self.graph.buffers_between}
        return Results(self.output(merge), logged, self._attributes(), between)

    def apply(self, results: Results, buffers: BuffersOfStep) -> Any:
        """Set attributes and buffers to those of the last stage, and log its values.

        Args:
            results: What the last stage has sent.
            buffers: The buffers that the step changes, from the step's outcome.

        Returns:
            The step's output for the whole batch.
        """
        output, logged, attributes, between = results
        restore(self._module, self.graph.changed, self._before)
        for (owner, key), (how, value) in zip(self.graph.changed, attributes, strict=bool(attributes)):
            if how == "append":
                vars(self._module.get_submodule(owner))[key].extend(value)
            elif how == "update":
                changed, removed = value
                own = vars(vars(self._module.get_submodule(owner))[key])
                own.update(changed)
                for name in removed:
                    own.pop(name)
            else:
                setattr(self._module.get_submodule(owner), key, value)
        buffers.set(between)
        # self.log makes tensors of numbers, and the precision plugin's context decides their dtype.
        with self._module.trainer.precision_plugin.forward_context():
            for (name, _), call in logged.items():
                value = call.value
                if call.metric is not None:
                    value = self._module.get_submodule(call.metric)
                    _compat.set_batch_value(value, call.value)
                self._module.log(name, value, **call.kwargs)
        return output

    def _attributes(self) -> list[tuple[Literal["append", "update", "set"], Any]]:
        """Return, for each attribute that the step changes, how other ranks must change it, and the data for that.

        Returns:
            For each attribute, a pair: ``"append"`` and the new items of a list to which the step has only appended;
            ``"update"`` and the changed attributes of an object of the user's code with the names of removed ones; or
            ``"set"`` and the new value.
        """
        packages = packages_of(self._module) if self.graph.changed else frozenset()
        found: list[tuple[Literal["append", "update", "set"], Any]] = []
        for (owner, key), (before, items) in zip(self.graph.changed, self._before, strict=True):
            value: Any = vars(self._module.get_submodule(owner)).get(key)
            if (
                value is before
                and isinstance(value, list)
                and items is not None
                and len(value) >= len(items)
                and all(map(operator.is_, value, items))
            ):
                found.append(("append", value[len(items) :]))
            elif value is before and is_object(value, packages):
                now, then = vars(value), dict(items or ())
                changed = {name: item for name, item in now.items() if name not in then or then[name] is not item}
                found.append(("update", (changed, [name for name in then if name not in now])))
            else:
                found.append(("set", value))
        return found

    def _merged(self, call: _Call, calls: list[_Logged]) -> _Logged:
        """Merge one call of ``self.log`` in all microbatches into the call that the whole batch would have made.

        Args:
            call: The name under which the call logs, and the number of the call with this name.
            calls: The record of the call in each microbatch that has made it.
        """
        first = calls[0]
        size = sum(call.num_samples for call in calls)
        kwargs = {**first.kwargs, "batch_size": size}
        if call in self.graph.fixed_sizes:
            kwargs["batch_size"] = first.kwargs["batch_size"]
        if first.metric is not None:
            metric = cast(Metric, self._module.get_submodule(first.metric))
            return _Logged(self._shared.value_of_batch(metric), kwargs, size, first.metric)
        if all(call.of_batch is not None for call in calls):
            of_batch = calls[-1].of_batch
            assert of_batch is not None
            return _Logged(of_batch(), kwargs, size)
        if self._of_whole_batch is not None and call in self._of_whole_batch.logged:
            return _Logged(self._of_whole_batch.logged[call], kwargs, size)
        if all(isinstance(call.value, int | float) for call in calls):
            return _Logged(sum(call.value * call.num_samples for call in calls) / size, kwargs, size)
        values = torch.stack([torch.as_tensor(call.value, device=self._module.device) for call in calls])
        reduce_fx = kwargs.get("reduce_fx", "mean")
        name = getattr(reduce_fx, "__name__", reduce_fx)
        if name in ("mean", "avg"):
            sizes = torch.tensor([call.num_samples for call in calls], dtype=torch.float64, device=values.device)
            weights = (sizes / size).view(-1, *([1] * (values.ndim - 1)))
            dtype = values.dtype if values.dtype.is_floating_point else torch.get_default_dtype()
            return _Logged((values * weights).sum(0).to(dtype), kwargs, size)
        merge: dict[Any, Callable[[Tensor], Tensor]] = {
            "sum": partial(torch.sum, dim=0),
            "max": partial(torch.amax, dim=0),
            "min": partial(torch.amin, dim=0),
        }
        return _Logged(merge.get(name, reduce_fx)(values), kwargs, size)


_Call = tuple[str, int]
"""Identifier of a call of ``self.log`` in a step: the name, and the number of the call with this name, from 1."""


@dataclass(frozen=True)
class _OfWholeBatch:
    """Hold the result and the logged values of the code between parts for the whole batch.

    Args:
        result: The detached result of the step.
        logged: The logged values by call, without metric objects.
    """

    result: Any
    logged: Mapping[_Call, Any]


class _WithoutHooks(TorchFunctionMode):
    """Ignore gradient hooks that are registered in this mode, because no gradients are computed in it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.retain_grad):
            return None
        return func(*args, **(kwargs or {}))


def _detached(value: Any) -> Any:
    return apply_to_collection(value, Tensor, Tensor.detach)


def _merge_part_output(of_one: Leaf, of_all: Leaf, parts: Sequence[Tensor]) -> Tensor:
    """Merge a tensor that a part returned for each microbatch into the one that it would return for the whole batch.

    The tensors are concatenated along the dimension in which the shapes for a microbatch and for the whole batch
    differ, or averaged if they are floating-point scalars. Otherwise the last one is returned.

    Args:
        of_one: Shape and dtype of the tensor in a step on one microbatch.
        of_all: Shape and dtype of the tensor in a step on the whole batch.
        parts: The tensor for each microbatch, in order.
    """
    if len(of_one.shape) == len(of_all.shape):
        for dim, (size, whole) in enumerate(zip(of_one.shape, of_all.shape, strict=True)):
            if size != whole:
                return torch.cat(list(parts), dim)
    if of_one.shape == of_all.shape and not of_one.shape and of_one.dtype.is_floating_point:
        return torch.stack(list(parts)).mean()
    return parts[-1]


_LOG_ARGUMENTS = tuple(signature_of(LightningModule.log).parameters)[3:]
"""Names of the parameters of ``self.log`` after ``self``, ``name`` and ``value``."""


def merged_outputs(losses: list[Tensor], results: list[Any], are_counts: bool) -> Any:
    """Merge the outputs of ``training_step`` on the microbatches.

    Losses are averaged, weighted by the microbatches' ``weight`` if they have one; the other values of a dict are
    merged by :func:`merge_values`.

    Args:
        losses: The detached loss of each microbatch.
        results: The output of ``training_step`` on each microbatch.
        are_counts: As for :func:`merge_values`.

    Returns:
        The loss, or a dict if ``training_step`` returned dicts, whose weight is the sum of the microbatches' weights.
    """
    if not isinstance(results[0], Mapping):
        return torch.stack(losses).mean()
    weights = [result.get("weight") for result in results]
    others = {
        key: merge_values([result[key] for result in results], are_counts)
        for key in results[0]
        if key not in ("loss", "weight")
    }
    if weights[0] is None:
        return {"loss": torch.stack(losses).mean(), **others}
    total = sum(weights)
    # A mean over no tokens is NaN, and would stay NaN when multiplied by a weight of zero.
    weighted = [weight * loss for weight, loss in zip(weights, losses, strict=True) if weight > 0]
    return {
        "loss": sum(weighted) / total if weighted else losses[0],
        "weight": total,
        **others,
    }


def merge_values(results: list[Any], are_counts: bool) -> Any:
    """Merge the outputs of the microbatches into one for the whole batch.

    Tensors and NumPy arrays are concatenated along dimension 0, and lists one after another. Floating-point scalars are
    averaged, and integers are summed if they are counts. Mappings, tuples and dataclasses are merged item by
    item. Where the microbatches have strings, booleans or None, the value of the first one is returned. Other objects
    that are not equal become :class:`Unmerged`.

    Args:
        results: The output of each microbatch, in order.
        are_counts: Whether integers depend on the size of the batch; if not, they are the same for all microbatches,
            such as the index of the batch.
    """
    first = results[0]
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(results)
    if isinstance(first, np.ndarray | np.generic):
        return np.asarray(merge_values([result.item() for result in results], are_counts=True))[()]
    if isinstance(first, Tensor):
        detached = [result.detach() for result in results]
        if first.ndim:
            return torch.cat(detached)
        return torch.stack(detached).mean() if first.is_floating_point() else torch.stack(detached).sum()
    if isinstance(first, float):
        return sum(results) / len(results)
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(results) if are_counts else first
    if isinstance(first, Mapping):
        items = {key: merge_values([result[key] for result in results], are_counts) for key in first}
        return type(first)(**items) if is_dataclass(first) else items  # ModelOutput is a Mapping and a dataclass.
    if isinstance(first, tuple):
        columns = [merge_values(list(column), are_counts) for column in zip(*results, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        return [item for result in results for item in result]
    if is_dataclass(first) and not isinstance(first, type):
        names = [entry.name for entry in fields(first) if entry.init]
        merged = {name: merge_values([getattr(result, name) for result in results], are_counts) for name in names}
        return replace(first, **merged)
    if isinstance(first, bool | str | bytes | None) or all(_is_equal(result, first) for result in results[1:]):
        return first
    return Unmerged(type(first).__name__)


def _is_equal(value: Any, other: Any) -> bool:
    try:
        return (value == other) is True
    except Exception:  # Comparing tables of different lengths raises an error, for example.
        return False


class Unmerged:
    """Stand in for outputs of microbatches that cannot be merged, and raise an error when it is used.

    Args:
        kind: The name of the objects' class.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Copying and pickling ask for such attributes.
            raise AttributeError(name)
        raise RuntimeError(
            f"The step returned one {self._kind} for each microbatch, and these cannot be merged into one for the whole"
            " batch. Under a pipeline, return tensors, arrays, lists, numbers, or dicts and dataclasses of them."
        )

    def __repr__(self) -> str:
        return f"Unmerged({self._kind!r})"
