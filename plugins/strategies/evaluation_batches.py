"""Check that all ranks have the same number of batches to validate, test or predict on."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_dist.plugins import _compat

__all__ = ["EvaluationBatches", "UnequalBatchesError"]


class UnequalBatchesError(RuntimeError):
    """Report that one rank has batches left to evaluate while another has none."""


class EvaluationBatches:
    """Compare the ranks' numbers of batches, at once if the loaders have lengths, and otherwise before each batch.

    Creating an instance is a collective over all processes.

    Args:
        trainer: A Trainer that is about to validate, test or predict.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._device = trainer.strategy.root_device
        numbers = [float(number) for number in _compat.num_evaluation_batches(trainer)]
        self._least, most = self._extremes(numbers)
        self._most = most
        self.are_unequal = self._least != most
        """Whether some rank has more batches than another, according to the loaders' lengths."""
        self._is_unknown = any(map(math.isinf, most)) and not self.are_unequal
        self._undo: Callable[[], None] | None = None
        if self._is_unknown:
            self._undo = _compat.before_reducing_evaluation(trainer, partial(self._agree, has_batch=False))

    def _extremes(self, numbers: list[float]) -> tuple[list[float], list[float]]:
        """Return the smallest and the largest value over all ranks of each of ``numbers``. This is a collective."""
        if not dist.is_initialized():
            return numbers, numbers
        extremes = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.float32, device=self._device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        values = extremes.tolist()
        return [-value for value in values[len(numbers) :]], values[: len(numbers)]

    def end(self) -> None:
        """Stop comparing the numbers of batches."""
        if self._undo is not None:
            self._undo()

    def before_step(self) -> None:
        """Check that all ranks have a batch, if the numbers of batches are unknown, which is a collective.

        Raises:
            UnequalBatchesError: On all ranks, if some rank has no batch.
        """
        if self._is_unknown:
            self._agree(has_batch=True)

    def _agree(self, has_batch: bool) -> None:
        """Raise on all ranks unless either all or none of them have a batch.

        This is a collective over all processes.
        """
        least, most = self._extremes([float(has_batch)])
        if least != most:
            raise UnequalBatchesError(
                f"This rank has {'a batch' if has_batch else 'no batch'} left to evaluate, and another has"
                f" {'none' if has_batch else 'one'}: the loaders give the ranks unequal numbers of batches, and have no"
                " lengths. Give the dataset a length, or give every rank the same number of batches."
            )

    def __str__(self) -> str:
        return ", ".join(
            f"{low:.0f} to {high:.0f}" for low, high in zip(self._least, self._most, strict=True) if low != high
        )
