"""Steps of a LightningModule under a pipeline: what Lightning is told of them, on every rank."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature as signature_of
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_dist.consensus import OtherRankError
from lightning_dist.pipeline import (
    Flow,
    Pipeline,
    PreparedStep,
    batch_size_of,
    find_flow,
    num_microbatches_for,
    signature,
    split_batch,
)
from lightning_dist.pipeline.attributes import keep, restore
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.example_step import fake_step
from lightning_dist.plugins.strategies.pipelined_metrics import SharedMetrics
from lightning_dist.plugins.strategies.weighting import LossWeights
from lightning_dist.sharding import ShardedModule

__all__ = ["PipelinedSteps"]


class PipelinedSteps:
    """Runs steps of ``module`` over a pipeline.

    Args:
        module: The user's module, cut into stages.
        spread: What it was made into.
        step_context: Around each microbatch's forward, by the name of the step.
    """

    def __init__(self, module: LightningModule, spread: ShardedModule, step_context: Callable[[str], Any]) -> None:
        assert spread.pipeline is not None
        self._module = module
        self._spread = spread
        self._pipeline: Pipeline = spread.pipeline
        self._step_context = step_context
        self._metrics = SharedMetrics(module, spread.pipeline)

    def train(self, weights: LossWeights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``training_step`` and its backward, and return what it returned, without a graph.

        Args:
            weights: Of losses that are means over unequal numbers.
            args: Of the step, the batch first.
            kwargs: Of the step.
        """
        accumulate = self._module.trainer.accumulate_grad_batches
        microbatches = self._split(args[0])
        losses: list[Tensor] = []

        def loss_of(result: Any) -> Tensor:
            loss = _loss(result)
            weights.read(result, loss.device)
            losses.append(loss.detach())
            if isinstance(result, Mapping) and result.get("weight") is not None:
                return weights.scale(loss) / accumulate
            return loss / (len(microbatches) * accumulate)

        prepared = self._prepare("training_step", microbatches[0], args, kwargs, len(microbatches), True)
        told = _Told(self._module, prepared.flow, len(microbatches), self._metrics)
        with self._spread.microbatches(with_backward=True) as run_root:
            steps = self._steps("training_step", microbatches, args, kwargs, prepared.flow, told)
            results = self._pipeline.run(prepared, steps, run_root, loss_of)
        self._spread.after_microbatches()
        output = told.tell(partial(_merged_outputs, results, losses), self._pipeline)
        if not self._pipeline.is_last and isinstance(output, Mapping) and output.get("weight") is not None:
            weights.add(torch.as_tensor(output["weight"], dtype=torch.float64, device=self._module.device))
        return output

    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step without a backward, and return what it returned."""
        microbatches = self._split(args[0])
        prepared = self._prepare(name, microbatches[0], args, kwargs, len(microbatches), False)
        told = _Told(self._module, prepared.flow, len(microbatches), self._metrics)
        with self._spread.microbatches(with_backward=False) as run_root:
            steps = self._steps(name, microbatches, args, kwargs, prepared.flow, told)
            results = self._pipeline.run(prepared, steps, run_root)
        return told.tell(partial(joined, results), self._pipeline)

    def _split(self, batch: Any) -> list[Any]:
        return split_batch(batch, num_microbatches_for(batch_size_of(batch), self._pipeline.config.num_microbatches))

    def _prepare(
        self, name: str, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, has_backward: bool
    ) -> PreparedStep:
        module, stages = self._module, self._pipeline.stages

        def follow() -> Flow:
            fake = fake_step(module, module.trainer, name, (batch, *args[1:]), kwargs)
            with self._pipeline.as_written.again():
                return find_flow(module, fake, module.device, stages.parts, stages.blocks)

        # All that a step's path, and which gradients it needs, may depend on.
        key = (
            name,
            signature((batch, args[2:], kwargs)),
            tuple(part.training for part in module.modules()),
            tuple(param.requires_grad for param in module.parameters()),
        )
        return self._pipeline.prepare(key, follow, number, has_backward)

    def _steps(
        self,
        name: str,
        microbatches: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flow: Flow,
        told: _Told,
    ) -> list[Callable[[], Any]]:
        def step(index: int) -> Any:
            batch = microbatches[index]
            if flow.changes_batch:  # which is run on by every stage of this rank
                batch = apply_to_collection(batch, Tensor, Tensor.clone)
            with told.logging(index, batch_size_of(batch)), self._metrics.in_step(), self._step_context(name):
                return getattr(self._module, name)(batch, *args[1:], **kwargs)

        return [partial(step, index) for index in range(len(microbatches))]


@dataclass
class _Logged:
    """A call of ``self.log`` in one microbatch."""

    value: Any
    kwargs: dict[str, Any]
    num_samples: int
    metric: str | None = None
    """The attribute that holds the metric whose value for the microbatch this is."""


class _Told:
    """What a step leaves besides its result: what it logs, and the attributes that it changes.

    Args:
        module: The user's module.
        flow: The step.
        num_microbatches: Into how many the batch is split.
        shared: The module's metrics.
    """

    def __init__(self, module: LightningModule, flow: Flow, num_microbatches: int, shared: SharedMetrics) -> None:
        self._module = module
        self._shared = shared
        self._num_microbatches = num_microbatches
        metrics = {name for name, metric in module.named_modules() if isinstance(metric, Metric)}
        self._changed = [(owner, key) for owner, key in flow.changed if owner not in metrics]
        self._before = keep(module, self._changed)
        self._logged: dict[str, dict[int, _Logged]] = {}

    @contextmanager
    def logging(self, index: int, num_samples: int) -> Iterator[None]:
        """Inside, what is logged is that of the microbatch ``index``."""

        def on_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            kwargs = {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **kwargs}
            size = kwargs.get("batch_size") or num_samples
            metric = None
            if isinstance(value, Metric):
                metric = next((path for path, found in self._module.named_modules() if found is value), None)
                if metric is None:
                    raise ValueError(
                        f"self.log({name!r}, ...) was given a {type(value).__name__} that is no attribute of"
                        f" {type(self._module).__name__}: under a pipeline it must be one, so that all ranks know it."
                    )
                value = None
            kept = apply_to_collection(value, Tensor, Tensor.detach)
            self._logged.setdefault(name, {})[index] = _Logged(kept, kwargs, size, metric)

        with _compat.logging_to(self._module, on_log):
            yield

    def tell(self, merge: Callable[[], Any], pipeline: Pipeline) -> Any:
        """Give every rank of ``pipeline`` what the last stage has, attributes and logs. A collective.

        Args:
            merge: Makes the step's output, on the last stage.
            pipeline: Whose ranks.

        Raises:
            OtherRankError: If the last stage could not put together what its microbatches have left.
        """
        told: list[bytes | str] = [""]
        error: Exception | None = None
        if pipeline.is_last:
            try:
                logged = {name: self._merged(list(calls.values())) for name, calls in self._logged.items()}
                content = apply_to_collection((merge(), logged, self._attributes()), Tensor, _portable)
                told = [pickle.dumps(content)]
            except Exception as raised:  # the others wait for it
                error = raised
                told = [f"{type(raised).__name__}: {raised}"]
        dist.broadcast_object_list(told, group=pipeline.group, group_src=pipeline.last_rank)
        if isinstance(told[0], str):
            raise error or OtherRankError(f"The last stage could not tell what a step has left: {told[0]}")
        output, logged, attributes = apply_to_collection(pickle.loads(told[0]), Tensor, Tensor.to, self._module.device)
        restore(self._module, self._changed, self._before)
        for (owner, key), (is_added, value) in zip(self._changed, attributes, strict=True):
            if is_added:
                vars(self._module.get_submodule(owner))[key].extend(value)
            else:
                setattr(self._module.get_submodule(owner), key, value)
        for name, call in logged.items():
            value = call.value
            if call.metric is not None:
                value = self._module.get_submodule(call.metric)
                vars(value)["_forward_cache"] = call.value
            self._module.log(name, value, **call.kwargs)
        return output

    def _attributes(self) -> list[tuple[bool, Any]]:
        """The value of each attribute that the step changes; of a list that it has added to, what, as of one step."""
        found: list[tuple[bool, Any]] = []
        for (owner, key), (before, content) in zip(self._changed, self._before, strict=True):
            value: Any = vars(self._module.get_submodule(owner)).get(key)
            is_list = value is before and isinstance(value, list) and isinstance(content, list)
            if is_list and len(value) >= len(content) and all(map(operator.is_, value, content)):
                found.append((True, self._of_one_step(value[len(content) :])))
            else:
                found.append((False, value))
        return found

    def _of_one_step(self, added: list[Any]) -> list[Any]:
        """What microbatches have added to a list, each as much, as what the whole batch would have."""
        per_microbatch, rest = divmod(len(added), self._num_microbatches)
        if rest or not all(isinstance(item, Tensor | Mapping | tuple | float) for item in added):
            return added  # an item a sample, say
        return [joined(added[place::per_microbatch]) for place in range(per_microbatch)]

    def _merged(self, calls: list[_Logged]) -> _Logged:
        """What microbatches have logged under one name, as one call."""
        first = calls[0]
        size = sum(call.num_samples for call in calls)
        kwargs = {**first.kwargs, "batch_size": size}
        if first.metric is not None:
            metric = cast(Metric, self._module.get_submodule(first.metric))
            return _Logged(self._shared.value_of_batch(metric), kwargs, size, first.metric)
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


def _portable(tensor: Tensor) -> Tensor:
    """``tensor`` as it is pickled: on the CPU, and in memory of its own, which no later step changes."""
    return tensor.detach().to("cpu", copy=True).contiguous()


_LOG_ARGUMENTS = tuple(signature_of(LightningModule.log).parameters)[3:]
"""Those after ``self``, ``name`` and ``value``."""


def _loss(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {type(result).__name__} for a microbatch: under a pipeline it must return the"
            " loss, or a dict with 'loss', for every one."
        )
    return loss


def _merged_outputs(results: list[Any], losses: list[Tensor]) -> Any:
    """What ``training_step`` returned, over all microbatches."""
    if not isinstance(results[0], Mapping):
        return torch.stack(losses).mean()
    weights = [result.get("weight") for result in results]
    others = {key: joined([result[key] for result in results]) for key in results[0] if key not in ("loss", "weight")}
    if weights[0] is None:
        return {"loss": torch.stack(losses).mean(), **others}
    total = sum(weights)
    return {
        "loss": sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / total,
        "weight": total,
        **others,
    }


def joined(results: list[Any]) -> Any:
    """Outputs of microbatches as that of the batch.

    Tensors one after another; floating-point numbers averaged, and whole numbers, which count, summed.
    """
    first = results[0]
    if isinstance(first, Tensor):
        detached = [result.detach() for result in results]
        if first.ndim:
            return torch.cat(detached)
        return torch.stack(detached).mean() if first.is_floating_point() else torch.stack(detached).sum()
    if isinstance(first, float):
        return sum(results) / len(results)
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(results)
    if isinstance(first, Mapping):
        return {key: joined([result[key] for result in results]) for key in first}
    if isinstance(first, tuple):
        return tuple(joined(list(column)) for column in zip(*results, strict=True))
    if isinstance(first, list):
        return [item for result in results for item in result]
    return first
