"""Steps of a LightningModule under a pipeline: what Lightning is told of them, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_dist.collectives import BytesBroadcast
from lightning_dist.pipeline import (
    Flow,
    Pipeline,
    PreparedStep,
    RunRoot,
    batch_size_of,
    find_flow,
    num_microbatches_for,
    signature,
    split_batch,
)
from lightning_dist.plugins.strategies.example_step import fake_step
from lightning_dist.plugins.strategies.pipelined_metrics import SharedMetrics
from lightning_dist.plugins.strategies.pipelined_outcome import Outcome, joined, merged_outputs
from lightning_dist.plugins.strategies.weighting import LossWeights
from lightning_dist.sharding import ShardedModule

__all__ = ["PipelinedSteps"]

_READABLE = (
    "current_epoch", "global_step", "max_epochs", "max_steps", "num_training_batches", "is_last_batch",
    "sanity_checking", "training", "validating", "testing", "predicting", "evaluating",
)  # fmt: skip
"""Properties of the Trainer that are plain and cheap to read, and that a step may decide by."""


class PipelinedSteps:
    """Runs steps of ``module`` over a pipeline.

    Args:
        module: The user's module, cut into stages.
        spread: What it was made into.
        step_context: Around each microbatch's forward, by the name of the step.
        scale: What a loss is to become before its backward.
    """

    def __init__(
        self,
        module: LightningModule,
        spread: ShardedModule,
        step_context: Callable[[str], Any],
        scale: Callable[[Tensor], Tensor],
    ) -> None:
        assert spread.pipeline is not None
        self._module = module
        self._modules = list(module.modules())
        self.parameters = list(module.parameters())
        """Of the module, sharded; to ask it in each step takes long."""
        self._spread = spread
        self._pipeline: Pipeline = spread.pipeline
        self._pipeline.readable = {Trainer: _READABLE}
        self._step_context = step_context
        self._scale = scale
        self._metrics = SharedMetrics(module, spread.pipeline)
        self._broadcast = BytesBroadcast(spread.pipeline.group, spread.pipeline.last_rank, module.device)

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
                return self._scale(weights.scale(loss) / accumulate)
            return self._scale(loss / (len(microbatches) * accumulate))

        prepared = self._prepare("training_step", microbatches[0], args, kwargs, len(microbatches), True)
        with self._spread.microbatches(with_backward=True) as run_root:
            outcome, results = self._run("training_step", microbatches, args, kwargs, prepared, run_root, loss_of)
        self._spread.after_microbatches()
        output = outcome.tell(partial(merged_outputs, results, losses), self._pipeline, self._broadcast)
        if not self._pipeline.is_last and isinstance(output, Mapping) and output.get("weight") is not None:
            weights.add(torch.as_tensor(output["weight"], dtype=torch.float64, device=self._module.device))
        return output

    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step without a backward, and return what it returned."""
        microbatches = self._split(args[0])
        prepared = self._prepare(name, microbatches[0], args, kwargs, len(microbatches), False)
        with self._spread.microbatches(with_backward=False) as run_root:
            outcome, results = self._run(name, microbatches, args, kwargs, prepared, run_root)
        return outcome.tell(partial(joined, results), self._pipeline, self._broadcast)

    def _split(self, batch: Any) -> list[Any]:
        return split_batch(batch, num_microbatches_for(batch_size_of(batch), self._pipeline.config.num_microbatches))

    def _prepare(
        self, name: str, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, has_backward: bool
    ) -> PreparedStep:
        module, stages = self._module, self._pipeline.stages

        def follow(arguments: Sequence[Any]) -> Flow:
            fake = fake_step(module, module.trainer, name, (batch, *arguments), kwargs)
            with self._pipeline.as_written.again():
                return find_flow(module, fake, module.device, stages.parts, stages.blocks)

        # All that a step's path, and which gradients it needs, may depend on.
        key = (
            name,
            signature((batch, kwargs)),
            tuple(part.training for part in self._modules),
            tuple(param.requires_grad for param in self.parameters),
        )
        return self._pipeline.prepare(key, follow, number, has_backward, args[1:])

    def _run(
        self,
        name: str,
        microbatches: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepared: PreparedStep,
        run_root: RunRoot,
        loss_of: Callable[[Any], Tensor] | None = None,
    ) -> tuple[Outcome, list[Any]]:
        """Run the step on all microbatches, and return what it has left and what it returned."""
        flow = prepared.flow
        outcome = Outcome(self._module, flow, [batch_size_of(batch) for batch in microbatches], self._metrics)

        def step(index: int) -> Any:
            batch = microbatches[index]
            if flow.changes_batch:  # which is run on by every stage of this rank
                batch = apply_to_collection(batch, Tensor, Tensor.clone)
            outcome.microbatch = index
            with self._step_context(name):
                return getattr(self._module, name)(batch, *args[1:], **kwargs)

        steps = [partial(step, index) for index in range(len(microbatches))]
        with outcome.logging(), self._metrics.in_step():
            return outcome, self._pipeline.run(prepared, steps, run_root, loss_of)


def _loss(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {type(result).__name__} for a microbatch: under a pipeline it must return the"
            " loss, or a dict with 'loss', for every one."
        )
    return loss
