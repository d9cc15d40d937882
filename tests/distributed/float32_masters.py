"""Train by plain torch in one process, with weights in float32 and the computation of a lower precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tests.distributed.fit import Weights
from tests.models import GPT

__all__ = ["LowPrecision", "TwoRates", "progress", "train_with_masters"]

LowPrecision = Literal["bf16-mixed", "16-mixed", "bf16-true"]


class TwoRates(GPT):
    """Train the blocks in steps that bfloat16 would mostly round away, and the rest fast enough for the loss to fall.

    The weights at the start are numbers that bfloat16 represents exactly.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        for param in self.parameters():
            param.data = param.data.to(torch.bfloat16).to(param.dtype)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(list(self.parameters()))

    def optimizer(self, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of ``weights``, which are the module's parameters or copies of them."""
        names = [name for name, _ in self.named_parameters()]
        rates = [(1e-4 if "blocks" in name else 1e-2, weight) for name, weight in zip(names, weights, strict=True)]
        groups = [{"params": [w for rate, w in rates if rate == lr], "lr": lr} for lr in (1e-4, 1e-2)]
        return torch.optim.AdamW(groups, weight_decay=0.0)


def train_with_masters(precision: LowPrecision, num_steps: int) -> tuple[Weights, list[float]]:
    """Return the weights in float32 and the losses of a training of :class:`TwoRates`.

    Args:
        precision: Precision of the forward and the backward.
        num_steps: Number of steps.
    """
    model, copies = TwoRates(), TwoRates()
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    masters = list(copies.parameters())
    optimizer = model.optimizer(masters)
    low = torch.float16 if precision == "16-mixed" else torch.bfloat16
    scale = 256.0 if precision == "16-mixed" else 1.0
    losses = []
    for step in range(num_steps):
        batch: Any = [part[8 * step : 8 * step + 8] for part in model.data()]
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
        with torch.autocast("cpu", low, enabled=precision != "bf16-true"):
            loss = model.loss(batch)
        model.zero_grad()
        (loss * scale).backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float() / scale
        optimizer.step()
        losses.append(float(loss))
    return weights_by_name(copies), losses


def weights_by_name(module: nn.Module) -> Weights:
    return {name: param.detach().numpy() for name, param in module.named_parameters()}


def progress(weights: Weights, reference: Weights) -> float:
    """Return how far the weights of the blocks have moved along the way of the reference, as a fraction of that way."""
    start = {name: weight for name, weight in weights_by_name(TwoRates()).items() if "blocks" in name}
    way = {name: reference[name] - start[name] for name in start}
    along = sum(float(((weights[name] - start[name]) * way[name]).sum()) for name in start)
    return along / sum(float(np.square(step).sum()) for step in way.values())
