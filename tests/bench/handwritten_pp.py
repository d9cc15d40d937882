"""Train the examples' GPT by torch's pipeline schedules, cut into two stages by hand, without Lightning and FSDP2.

This follows torch's documentation of ``torch.distributed.pipelining`` ("Option 1: splitting a model manually").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from examples.gpt.model import GPT
from tests.bench import handwritten
from tests.bench.harness import EndStep
from tests.bench.workload import Workload

__all__ = ["NUM_MICROBATCHES", "PP_SIZE", "train"]

PP_SIZE = 2
NUM_MICROBATCHES = 8


class Stage(nn.Module):
    """Run one half of the blocks, and the embedding before them or the norm and head after them."""

    def __init__(self, model: GPT, rank: int) -> None:
        super().__init__()
        half = len(model.blocks) // PP_SIZE
        self.embedding = model.embedding if rank == 0 else None
        self.blocks = model.blocks[rank * half : (rank + 1) * half]
        self.norm, self.head = (model.norm, model.head) if rank == PP_SIZE - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes to activations on the first stage, and activations to logits on the last."""
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def train(workload: Workload, end_step: EndStep, schedule_class: type[Schedule1F1B | ScheduleGPipe]) -> None:
    """Train by torch's schedule until ``end_step``, which is called with the loss after every step, returns False."""
    rank = dist.get_rank()
    torch.manual_seed(workload.seed)
    model = Stage(GPT(**workload.model), rank)
    schedule = schedule_class(
        PipelineStage(model, rank, PP_SIZE, torch.device("cpu")), NUM_MICROBATCHES, loss_fn=_cross_entropy
    )
    optimizer, scheduler = handwritten.configure_optimizer(model, workload.num_steps)
    for inputs, targets in workload.batches(1, 0):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        scheduler.step()
        # The harness compares the losses of both sides on every rank.
        loss = torch.stack(losses).mean().detach() if losses else torch.empty(())
        dist.broadcast(loss, src=PP_SIZE - 1)
        if not end_step(loss):
            return


def _cross_entropy(logits: Any, targets: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
