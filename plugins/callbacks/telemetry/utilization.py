"""Count the operations of a run's first batch, to compare the run's speed with what its devices can do at most."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.parallel_module import parallelized
from lightning_dist.run.telemetry import FlopCounter, Flops, batch_size, peak_of
from lightning_dist.techniques.protocol import TokenSplits

__all__ = ["Utilization"]

_TERA = 1e12


class Utilization:
    """Estimate how many operations batches take on this rank, and how many its device can run per second.

    The operations of the first batch are counted while it runs. Those of other batches are taken to be proportional to
    their tokens, or to their samples if there are no tokens.

    Args:
        trainer: The Trainer of the fit.
        module: The user's module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._dtype = _compute_dtype(trainer)
        parallel = parallelized(module)
        split = None if parallel is None else parallel.get(TokenSplits)
        copied = [] if split is None else split.copied_modules(module)
        self._counter = FlopCounter(copied, 1 if split is None else split.num_ranks)
        self._counting = ExitStack()
        self._flops: Flops | None = None
        self._amount = 1
        self._peak = math.nan

    def begin_count(self) -> None:
        """Begin to count the operations of a batch."""
        self._counting.enter_context(self._counter)

    def stop(self) -> None:
        """Stop counting; do nothing if nothing is counted."""
        self._counting.close()

    def end_count(self, batch: Any) -> None:
        """Stop counting at the end of ``batch``; do nothing if nothing is counted."""
        if self._flops is not None:
            return
        self.stop()
        self._flops = self._counter.flops
        size = batch_size(batch)
        self._amount = size.tokens or size.samples
        if self._counter.failure:
            rank_zero_warn(f"perf/mfu and perf/hfu are not logged: {self._counter.failure}")
        elif self._flops.hardware and self._amount:
            peak = peak_of(self._device, self._dtype)
            self._peak = peak.flops_per_s / _TERA
            rank_zero_info(f"perf/mfu is relative to {self._peak:.4g} TFLOP/s per device ({peak.source}).")

    def figures(self, num_samples: int, num_tokens: int) -> dict[str, float]:
        """Return this rank's operations for some batches and its device's peak, by name; NaN: unknown.

        Args:
            num_samples: Number of samples in the batches.
            num_tokens: Number of tokens in the batches.
        """
        flops = self._flops or Flops(math.nan, math.nan)
        scale = (num_tokens or num_samples) / max(self._amount, 1) / _TERA
        return {
            "model_tflop": scale * flops.model,
            "hardware_tflop": scale * flops.hardware,
            "peak_tflops": self._peak,
        }


def _compute_dtype(trainer: Trainer) -> torch.dtype:
    """Return the dtype in which the matrix products of the run are computed."""
    precision = str(trainer.precision)
    for prefix, dtype in (("64", torch.float64), ("32", torch.float32), ("16", torch.float16)):
        if precision.startswith(prefix):
            return dtype
    return torch.bfloat16
