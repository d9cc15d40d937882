"""Steps of a LightningModule under a pipeline: what Lightning is told of them, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

from lightning_dist.pipeline import (
    Flow,
    Pipeline,
    batch_size_of,
    find_flow,
    num_microbatches_for,
    signature,
    split_batch,
)
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.example_step import fake_step
from lightning_dist.plugins.strategies.weighting import LossWeights
from lightning_dist.sharding import ShardedModule

__all__ = ["PipelinedSteps"]


@dataclass
class _Logged:
    """A call of ``self.log`` in one microbatch."""

    value: Any
    kwargs: dict[str, Any]
    num_samples: int


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
        self._largest: dict[str, int] = {}

    def train(self, weights: LossWeights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``training_step`` and its backward, and return what it returned, without a graph.

        Args:
            weights: Of losses that are means over unequal numbers.
            args: Of the step, the batch first.
            kwargs: Of the step.
        """
        accumulate = self._module.trainer.accumulate_grad_batches
        microbatches = self._split("training_step", args[0])
        losses: list[Tensor] = []

        def loss_of(result: Any) -> Tensor:
            loss = _loss(result)
            weights.read(result, loss.device)
            losses.append(loss.detach())
            if isinstance(result, Mapping) and result.get("weight") is not None:
                return weights.scale(loss) / accumulate
            return loss / (len(microbatches) * accumulate)

        with self._spread.microbatches(with_backward=True) as run_root:
            results, logged = self._run("training_step", microbatches, args, kwargs, run_root, loss_of)
        self._spread.after_microbatches()
        output: Any = None
        if self._pipeline.is_last:
            output = _merged_outputs(results, losses)
        return self._tell(output, logged)

    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step without a backward, and return what it returned."""
        microbatches = self._split(name, args[0])
        with self._spread.microbatches(with_backward=False) as run_root:
            results, logged = self._run(name, microbatches, args, kwargs, run_root, None)
        output = _joined(results) if self._pipeline.is_last else None
        return self._tell(output, logged)

    def _split(self, name: str, batch: Any) -> list[Any]:
        size, largest = batch_size_of(batch), self._largest.get(name, 0)
        number = num_microbatches_for(size, self._pipeline.config.num_microbatches, largest)
        self._largest[name] = max(size, largest)
        return split_batch(batch, number)

    def _run(
        self,
        name: str,
        microbatches: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_root: Any,
        loss_of: Callable[[Any], Tensor] | None,
    ) -> tuple[list[Any], list[dict[str, _Logged]]]:
        module, pipeline = self._module, self._pipeline
        logged: list[dict[str, _Logged]] = [{} for _ in microbatches]

        def step(index: int) -> Any:
            batch = microbatches[index]
            size = batch_size_of(batch)

            def on_log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
                kept = value if isinstance(value, Metric) else apply_to_collection(value, Tensor, Tensor.detach)
                logged[index][name] = _Logged(kept, _log_arguments(*args, **kwargs), kwargs.get("batch_size") or size)

            with _compat.logging_to(module, on_log), self._step_context(name):
                return getattr(module, name)(batch, *args[1:], **kwargs)

        def follow() -> Flow:
            fake = fake_step(module, module.trainer, name, (microbatches[0], *args[1:]), kwargs)
            with self._spread.as_written():
                return find_flow(module, fake, module.device, self._pipeline.stages.parts, self._pipeline.stages.blocks)

        key = (name, module.training, signature(microbatches[0]))
        results = pipeline.run(
            key, follow, [partial(step, index) for index in range(len(microbatches))], run_root, loss_of
        )
        return results, logged

    def _tell(self, output: Any, logged: list[dict[str, _Logged]]) -> Any:
        """Give every rank of the pipeline the last stage's output, and log there what it logged."""
        pipeline = self._pipeline
        told: list[Any] = [None]
        if pipeline.is_last:
            merged = {name: self._merged([calls[name] for calls in logged if name in calls]) for name in _names(logged)}
            told = [apply_to_collection((output, merged), Tensor, Tensor.cpu)]
        dist.broadcast_object_list(told, group=pipeline.group, group_src=pipeline.last_rank)
        output, merged = apply_to_collection(told[0], Tensor, Tensor.to, self._module.device)
        for name, (value, kwargs) in merged.items():
            is_metric = isinstance(value, str)
            self._module.log(name, cast(Metric, self._module.get_submodule(value)) if is_metric else value, **kwargs)
        return output

    def _merged(self, calls: list[_Logged]) -> tuple[Any, dict[str, Any]]:
        """What microbatches have logged under one name, as one call: the value, and the arguments."""
        kwargs = {**calls[0].kwargs, "batch_size": sum(call.num_samples for call in calls)}
        value = calls[0].value
        if isinstance(value, Metric):
            return next(name for name, module in self._module.named_modules() if module is value), kwargs
        reduce_fx = kwargs.get("reduce_fx", "mean")
        values = torch.stack([torch.as_tensor(call.value, device=self._module.device) for call in calls])
        if reduce_fx in ("mean", "avg", torch.mean):
            sizes = torch.tensor([call.num_samples for call in calls], dtype=torch.float64, device=values.device)
            shape = (-1, *([1] * (values.ndim - 1)))
            dtype = values.dtype if values.dtype.is_floating_point else torch.float32
            return ((values * sizes.view(shape)).sum(0) / sizes.sum()).to(dtype), kwargs
        by_name: dict[Any, Callable[[Tensor], Tensor]] = {
            "sum": partial(torch.sum, dim=0),
            "max": partial(torch.amax, dim=0),
            "min": partial(torch.amin, dim=0),
        }
        return by_name.get(getattr(reduce_fx, "__name__", reduce_fx), reduce_fx)(values), kwargs


_LOG_ARGUMENTS = tuple(signature_of(LightningModule.log).parameters)[3:]
"""Those after ``self``, ``name`` and ``value``."""


def _log_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(_LOG_ARGUMENTS, args, strict=False)), **kwargs}


def _names(logged: list[dict[str, _Logged]]) -> Iterator[str]:
    return iter({name: None for calls in logged for name in calls})


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
    others = {key: _joined([result[key] for result in results]) for key in results[0] if key not in ("loss", "weight")}
    if weights[0] is None:
        return {"loss": torch.stack(losses).mean(), **others}
    total = sum(weights)
    return {
        "loss": sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / total,
        "weight": total,
        **others,
    }


def _joined(results: list[Any]) -> Any:
    """Outputs of microbatches as that of the batch: tensors one after another, numbers without dimensions averaged."""
    first = results[0]
    if isinstance(first, Tensor):
        detached = [result.detach() for result in results]
        return torch.cat(detached) if first.ndim else torch.stack(detached).float().mean().to(first.dtype)
    if isinstance(first, Mapping):
        return {key: _joined([result[key] for result in results]) for key in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(column)) for column in zip(*results, strict=True))
    if isinstance(first, list):
        return [item for result in results for item in result]
    return first
