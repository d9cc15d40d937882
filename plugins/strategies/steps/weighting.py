"""Compute the exact weighted mean of losses that are means over unequal numbers of tokens.

DDP averages the means of the ranks, so that a token counts more on a rank that has few of them. A step that returns
``{"loss": l, "weight": n}``, where ``l`` is a mean over ``n`` tokens, gets the gradient of ``sum(n * l) / sum(n)`` over
all ranks and all microbatches of an optimizer step instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.mesh.membership import current_membership

__all__ = ["LossWeights"]


class LossWeights:
    """Multiply each loss by its weight, and divide the gradients of an optimizer step by the sum of the weights."""

    def __init__(self) -> None:
        self._current: Tensor | None = None
        self._total: Tensor | None = None

    def read(self, output: Any, device: torch.device, steps_in_backward: bool = False) -> None:
        """Read the weight, if there is one, from the output of ``training_step``.

        Args:
            output: The output of ``training_step``.
            device: Device of the loss.
            steps_in_backward: Whether optimizers update parameters in the backward, so that no loss can have a weight.

        Raises:
            ValueError: If the weight is negative or not finite, only some microbatches of a step have one, the
                optimizers step before the sum of the weights is known, or replicas leave and join the run.
        """
        self._current = None
        if not isinstance(output, Mapping) or output.get("weight") is None:
            if self._total is not None:
                raise ValueError(
                    "training_step returned a loss without a 'weight', but one with it earlier in the same optimizer"
                    " step: return {'loss': ..., 'weight': ...} always or never."
                )
            return
        if steps_in_backward:
            raise ValueError(
                "step_in_backward=True with a training_step that returns {'loss': ..., 'weight': ...}: gradients are"
                " divided by the sum of all weights after the backward, when the optimizer has stepped already. Leave"
                " one of the two out."
            )
        if current_membership() is not None:
            raise ValueError(
                "elastic with a training_step that returns {'loss': ..., 'weight': ...}: the sum of the weights is"
                " known inside a replica only. Leave one of the two out."
            )
        weight = torch.as_tensor(output["weight"], dtype=torch.float64, device=device).detach()
        if not bool(torch.isfinite(weight)) or bool(weight < 0):
            raise ValueError(f"training_step returned weight={float(weight)}; it must be a finite number, 0 or more.")
        self._current = weight

    def add(self, weight: Tensor) -> None:
        """Add the weight of a loss that another rank has scaled to the sum of the weights."""
        self._total = weight if self._total is None else self._total + weight

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the weight that :meth:`read` has read, and add the weight to the sum."""
        if self._current is None:
            return loss
        self._total = self._current if self._total is None else self._total + self._current
        # A mean over no tokens is NaN, and would stay NaN when multiplied by zero.
        return torch.where(self._current > 0, loss, 0.0) * self._current.to(loss.dtype)

    def normalize(self, params: Iterable[nn.Parameter], num_losses: int) -> None:
        """Divide the reduced gradients by the sum of all ranks' weights, if steps return weights.

        This is a collective in that case.

        Args:
            params: Parameters whose gradients are means over ranks of sums over losses, each of which was divided
                by ``num_losses``.
            num_losses: Number of losses of an optimizer step: of its batches or microbatches.
        """
        if self._total is None:
            return
        total = self._total.clone()
        dist.all_reduce(total)
        self._total = None
        factor = dist.get_world_size() * num_losses / float(total) if total else 0.0
        for param in params:
            if param.grad is not None:
                param.grad.mul_(factor)
