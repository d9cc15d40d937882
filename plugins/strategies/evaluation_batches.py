"""Let ranks validate, test and predict on unequal numbers of batches."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_dist.mesh.objects import gather_objects
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.uneven_batches import ranks_text

__all__ = ["EvaluationBatches", "SameResults", "UnequalBatchesError", "others_have_batches"]


class UnequalBatchesError(RuntimeError):
    """Report that ranks that must evaluate equally many batches have unequal numbers of them."""


class EvaluationBatches:
    """Find out whether ranks have unequal numbers of batches, from the loaders' lengths or else before each batch.

    Ranks with unequal numbers cannot gather parameters together for each batch. When the numbers are found to be
    unequal, every rank gathers the whole model, and then runs its own number of batches.

    Creating an instance is a collective over all processes.

    Args:
        trainer: A Trainer that is about to validate, test or predict.
        parts: For each rank, the index of the part of a batch that it has. Ranks with the same part must have equally
            many batches.
        policy: ``"raise"`` if unequal numbers are an error; ``"stop"`` if not.
        gather: Function that gathers the whole model on every rank, given the beginning of a sentence that says why.
            All ranks call it together.
    """

    def __init__(self, trainer: Trainer, parts: list[int], policy: str, gather: Callable[[str], None]) -> None:
        self._device = trainer.strategy.root_device
        self._parts = parts
        self._policy = policy
        self._gather = gather
        numbers = [float(number) for number in _compat.num_evaluation_batches(trainer)]
        of_all = gather_objects(numbers) if dist.is_initialized() else [numbers]
        self._is_unknown = False
        self._undo: Callable[[], None] | None = None
        if any(other != numbers for other in of_all):
            pairs = zip(map(min, zip(*of_all, strict=True)), map(max, zip(*of_all, strict=True)), strict=True)
            text = ", ".join(f"{_number(low)} to {_number(high)}" for low, high in pairs if low != high)
            self._handle(f"Ranks have unequal numbers of batches to evaluate ({text})", of_all)
        elif any(map(math.isinf, numbers)):
            self._is_unknown = True
            self._undo = _compat.before_reducing_evaluation(trainer, partial(self._agree, has_batch=False))

    def end(self) -> None:
        """Stop comparing the numbers of batches."""
        if self._undo is not None:
            self._undo()

    def before_step(self) -> None:
        """Find out whether all ranks have a batch, if the numbers of batches are unknown, which is a collective.

        Raises:
            UnequalBatchesError: On all ranks, if some rank has no batch and must have one.
        """
        self._agree(has_batch=True)

    def _agree(self, has_batch: bool) -> None:
        """Find out whether either all or none of the ranks have a batch.

        This is a collective over all processes, as long as their numbers of batches seem to be equal.
        """
        if not self._is_unknown or not dist.is_initialized():
            return
        has = torch.zeros(len(self._parts), device=self._device)
        has[dist.get_rank()] = float(has_batch)
        dist.all_reduce(has)
        of_all = has.tolist()
        without = [rank for rank, has_one in enumerate(of_all) if not has_one]
        if without and len(without) < len(self._parts):
            self._is_unknown = False
            self._handle(f"The data of {ranks_text(without)} have ended, and other ranks have batches left", of_all)

    def _handle(self, found: str, of_all: Sequence[object]) -> None:
        """Gather the whole model on every rank, as their numbers of batches are unequal.

        Args:
            found: Beginning of a sentence that says what was found.
            of_all: Numbers of batches of each rank.

        Raises:
            UnequalBatchesError: If unequal numbers are an error, or ranks with the same part of a batch have them.
        """
        of_part = dict(zip(self._parts, of_all, strict=True))
        mixed = [rank for rank, part in enumerate(self._parts) if of_part[part] != of_all[rank]]
        if mixed:
            raise UnequalBatchesError(
                f"{found}. Ranks that share layers or a pipeline must have the same batches, and {ranks_text(mixed)}"
                " must have as many as the other ranks with the same part of the data."
            )
        if self._policy == "raise":
            raise UnequalBatchesError(
                f"uneven_batches='raise'. {found}. Give all ranks as many batches, by a DistributedSampler, or use"
                " uneven_batches='stop', with which each rank evaluates its own."
            )
        self._gather(found)


def _number(value: float) -> str:
    return "unknown" if math.isinf(value) else f"{value:.0f}"


def others_have_batches(numbers: list[float]) -> list[bool]:
    """Return for each loader whether a rank has a batch to evaluate. This is a collective over all processes.

    Args:
        numbers: This rank's number of batches of each loader; infinity if it is unknown.

    Raises:
        UnequalBatchesError: On all ranks, if a rank has no batch of one of several loaders, and others have some.
    """
    of_all = gather_objects(numbers) if dist.is_initialized() else [numbers]
    by_loader = list(zip(*of_all, strict=False))
    for index, counts in enumerate(by_loader):
        empty = [rank for rank, count in enumerate(counts) if count == 0]
        if len(by_loader) > 1 and empty and len(empty) < len(counts):
            raise UnequalBatchesError(
                f"The loader {index} of {len(by_loader)} has no batch to evaluate on {ranks_text(empty)}, and others"
                " have some. Ranks would reduce what they log for different loaders. Give each rank a batch of it."
            )
    return [any(counts) for counts in by_loader]


class SameResults:
    """Let all ranks reduce the same values at the end of an evaluation, also those that a rank has not logged.

    A rank without batches has logged nothing, and would not take part in the reductions of the others. It takes part
    with no samples instead.

    Args:
        trainer: A Trainer that is about to validate or test.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self._undo: Callable[[], None] = lambda: None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._undo = _compat.before_reducing_evaluation(trainer, self._agree)

    def end(self) -> None:
        """Stop comparing what ranks have logged."""
        self._undo()

    def _agree(self) -> None:
        own = _compat.described_results(self._trainer)
        digest = zlib.crc32(repr([(key, loader) for key, loader, _ in own]).encode())
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=self._device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        most, least = extremes.tolist()
        if most == -least:
            return
        of_all = gather_objects(own)
        if len({loader for described in of_all for _, loader, _ in described}) > 1:
            raise UnequalBatchesError(
                "Ranks have ended the evaluation of different loaders, because some of them have no batch of one of"
                " several loaders. Give each rank a batch of each loader."
            )
        first: dict[object, tuple[object, ...]] = {}
        for described in of_all:
            for entry in described:
                first.setdefault(entry[0], entry)
        _compat.complete_results(self._trainer, list(first.values()))
