"""Record a run under a strategy: its batches, random states and initial weights, and what its steps computed."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.plugins.parity_check.randomness import random_states
from lightning_dist.run.parity import Gathered, gather_gradients, gather_parameters, whole_buffers

__all__ = ["RecordedBatch", "Recorder", "Recording", "loosen_plateaus", "number_of"]


@dataclass
class RecordedBatch:
    """Hold a batch of ``training_step``, and what is needed to repeat the step.

    Args:
        batch: The batch as the step was given it, on the CPU.
        batch_idx: Index of the batch in the epoch.
        random_states: States of the random number generators before the step.
        loss: Loss that the step returned; None if it returned none.
        weight: Weight of the loss, if the step returned one.
    """

    batch: Any
    batch_idx: int
    random_states: dict[str, Any]
    loss: float | None = None
    weight: float | None = None


@dataclass
class Recording:
    """Hold what a run has computed, complete only on rank 0.

    Args:
        initial: Whole parameters before the first step, by name.
        buffers: Buffers before the first step, by name.
        batches: For each data-parallel rank, its batches in their order.
        gradients: Whole gradients of the first optimizer step, before clipping.
        weights: Whole parameters after the last step.
        num_batches: Number of batches of an epoch on a rank; infinity if it is not known.
        is_automatic: Whether Lightning runs the optimizers.
        num_updates: Number of optimizer steps.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    batches: list[list[RecordedBatch]] = field(default_factory=list)
    gradients: Gathered = field(default_factory=lambda: Gathered({}, {}))
    weights: Gathered = field(default_factory=lambda: Gathered({}, {}))
    num_batches: float = math.inf
    is_automatic: bool = True
    num_updates: int = 0


class Recorder(Callback):
    """Record a run, and end it after a number of steps.

    Args:
        num_steps: Number of optimizer steps; with manual optimization, of batches.
        layout: Layout of the ranks.
        device: Device of this rank.
    """

    def __init__(self, num_steps: int, layout: ParallelLayout, device: torch.device) -> None:
        self._num_steps = num_steps
        self._layout = layout
        self._device = device
        self._own: list[RecordedBatch] = []
        self._has_gradients = False
        self.recording = Recording()
        self.is_complete = False

    @property
    def num_calls(self) -> int:
        """Return the number of calls of ``training_step`` on this rank so far."""
        return len(self._own)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recording.num_batches = trainer.num_training_batches
        self.recording.is_automatic = pl_module.automatic_optimization
        loosen_plateaus(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._own:
            self.recording.initial = gather_parameters(pl_module, self._device).tensors
            self.recording.buffers = whole_buffers(pl_module)
        kept = move_data_to_device(copy.deepcopy(batch), torch.device("cpu"))
        self._own.append(RecordedBatch(kept, batch_idx, random_states(pl_module)))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # With manual optimization, each optimizer has gradients of its own parameters at its own time.
        if self.recording.is_automatic and self._has_gradients:
            return
        self._has_gradients = True
        found = gather_gradients(pl_module, self._device)
        for name, gradient in found.tensors.items():
            self.recording.gradients.tensors.setdefault(name, gradient)
        for name, difference in found.differing.items():
            self.recording.gradients.differing.setdefault(name, difference)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last = self._own[-1]
        loss = number_of(outputs, "loss")
        last.loss = None if loss is None else loss * trainer.accumulate_grad_batches
        last.weight = number_of(outputs, "weight")
        is_automatic = self.recording.is_automatic
        if (trainer.global_step if is_automatic else len(self._own)) < self._num_steps:
            return
        self.recording.num_updates = trainer.global_step
        self.recording.weights = gather_parameters(pl_module, self._device)
        self._collect_batches()
        self.is_complete = True
        trainer.should_stop = True

    def _collect_batches(self) -> None:
        """Send the batches of one rank of each data-parallel part to rank 0. This is a collective."""
        rank, parts = dist.get_rank(), [self._layout.data_parallel_rank(r) for r in range(dist.get_world_size())]
        is_first_of_part = parts.index(parts[rank]) == rank
        gathered: list[Any] | None = [None] * len(parts) if rank == 0 else None
        dist.gather_object(self._own if is_first_of_part else None, gathered, 0)
        if gathered is not None:
            self.recording.batches = [gathered[parts.index(part)] for part in range(max(parts) + 1)]


def loosen_plateaus(trainer: Trainer) -> None:
    """Let schedulers that follow a metric of the validation, which is left out, keep their learning rates."""
    for config in trainer.lr_scheduler_configs:
        config.strict = False


def number_of(outputs: Any, key: str) -> float | None:
    """Return a number from what ``training_step`` returned; None if there is none.

    Args:
        outputs: A mapping, or a tensor, which counts as the loss.
        key: Key of the number.
    """
    value = outputs.get(key) if isinstance(outputs, Mapping) else outputs if key == "loss" else None
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, float | int) else None
