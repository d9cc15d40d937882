"""Trace a step on tensors without values, with collectives replaced by operations on this rank's tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dist.plugins.strategies.steps.collectives import stand_ins_for_collectives
from lightning_dist.plugins.strategies.steps.example_step import parameters_unchanged
from lightning_dist.tracing.step_graph import note_exchange

__all__ = ["StepTracing"]


class StepTracing:
    """Replace collectives by stand-ins while a step is traced, because ranks may trace at different times.

    Args:
        num_parts: The number of parts into which the batch is divided.
        peers: The ranks that have the same stages as this one.
    """

    def __init__(self, num_parts: int, peers: Collection[int]) -> None:
        self._num_parts = num_parts
        self.peers = peers
        self.is_active = False
        """Whether a step is being traced."""

    @contextmanager
    def around(self, module: LightningModule) -> Iterator[None]:
        """Replace collectives in this context, in which a step of ``module`` runs on tensors without values."""
        before, self.is_active = self.is_active, True
        try:
            with stand_ins_for_collectives(self.peers), parameters_unchanged(module):
                yield
        finally:
            self.is_active = before

    def all_gather(self, tensor: Tensor, sync_grads: bool) -> Tensor:
        """Return a tensor of the shape that gathering ``tensor`` from all parts of the batch would return.

        Args:
            tensor: This rank's tensor, which has no values.
            sync_grads: Whether the result is connected to ``tensor`` in the autograd graph.
        """
        note_exchange(tensor)
        return torch.stack([tensor if sync_grads else tensor.detach()] * self._num_parts)

    def reduce(self, tensor: Any) -> Any:
        """Return a tensor of the shape that reducing ``tensor`` over all parts of the batch would return."""
        if not isinstance(tensor, Tensor):
            return tensor
        note_exchange(tensor)
        return tensor.clone()
