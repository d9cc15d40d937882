"""End an epoch of training on all ranks together if their loaders give them unequal numbers of batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist._compat import new_group_of
from lightning_dist.mesh.collectives import begin_any_of_flags
from lightning_dist.mesh.objects import gather_objects
from lightning_dist.plugins import _compat

__all__ = ["POLICIES", "TrainingBatches", "UnevenBatchesError", "check_that_all_have_lengths", "ranks_text"]

POLICIES = ("stop", "raise")
"""What ranks can do where they have unequal numbers of batches."""


class UnevenBatchesError(RuntimeError):
    """Report that ranks have unequal numbers of training batches, or no batches at all."""


def ranks_text(ranks: list[int]) -> str:
    """Return the words that name some ranks, such as ``rank 1`` or ``ranks 1, 3``."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def check_that_all_have_lengths(loader: Any, trainer: Trainer) -> None:
    """Check that a loader has a length on all ranks or on none. This is a collective over all processes.

    Args:
        loader: This rank's loader.
        trainer: The Trainer that is about to use it.

    Raises:
        UnevenBatchesError: On all ranks, if the loader has a length on some ranks only.
    """
    has_length, agree = _compat.has_length(loader), trainer.strategy.reduce_boolean_decision
    if agree(has_length, all=False) != agree(has_length, all=True):
        raise UnevenBatchesError(
            f"The {type(loader).__name__} has a length on some ranks and none on others; here it has"
            f" {'one' if has_length else 'none'}. Give all ranks loaders of the same kind."
        )


class TrainingBatches:
    """Give all ranks of a fit equally many batches in each epoch.

    The numbers of batches are compared before the first epoch where loaders have lengths. Otherwise ranks tell each
    other in each step whether they have the batch after the next one. This happens in the background.

    Args:
        trainer: The Trainer of a fit that begins.
        policy: One of :data:`POLICIES`.
    """

    def __init__(self, trainer: Trainer, policy: str) -> None:
        self._policy = policy
        self._group: dist.ProcessGroup | None = None
        self._has_warned = False
        if dist.is_initialized() and dist.get_world_size() > 1:
            _compat.agree_on_training_batches(trainer, self._limit, self._exchange)

    def _limit(self, loaders: list[Any], limits: list[float]) -> list[float]:
        """Return the number of batches of each loader that all ranks fetch. This is a collective over all processes.

        Raises:
            UnevenBatchesError: On all ranks, if the numbers differ and the policy is to raise, or a rank has none.
        """
        of_all = gather_objects(limits)
        if all(other == limits for other in of_all):
            return limits
        if len({len(other) for other in of_all}) > 1:
            raise UnevenBatchesError(
                f"Ranks have different numbers of training loaders ({', '.join(str(len(other)) for other in of_all)})."
                " Return equally many on all ranks."
            )
        by_loader = [[other[index] for other in of_all] for index in range(len(limits))]
        for numbers in by_loader:
            empty = [rank for rank, number in enumerate(numbers) if number == 0]
            if empty and len(empty) < len(numbers):
                raise UnevenBatchesError(
                    f"The training loader of {ranks_text(empty)} has no batch, and others have up to"
                    f" {_number(max(numbers))}. Give each rank a part of the data."
                )
        differing = next(numbers for numbers in by_loader if len(set(numbers)) > 1)
        text = f"between {_number(min(differing))} and {_number(max(differing))} training batches in an epoch"
        if self._policy == "raise":
            raise UnevenBatchesError(
                f"uneven_batches='raise', and ranks have {text}. Give all ranks equally many, by a DistributedSampler"
                " or drop_last=True, or use uneven_batches='stop', which leaves out what others do not have."
            )
        rank_zero_warn(
            f"Ranks have {text}. All of them end each epoch after the smallest number, and leave out further batches"
            " (uneven_batches='stop')."
        )
        return [min(numbers) for numbers in by_loader]

    def _exchange(self, loaders: list[Any]) -> Callable[[int, bool], Callable[[], bool]] | None:
        """Return the function by which ranks agree on each batch; None if lengths are sure to be right.

        This is a collective over all processes.
        """
        if all(gather_objects(all(map(_compat.is_surely_sized, loaders)))):
            return None
        self._create_group()
        return self._begin

    def _create_group(self) -> dist.ProcessGroup:
        """Return the process group in which ranks agree. The first call is a collective over all processes."""
        if self._group is None:
            self._group = new_group_of(range(dist.get_world_size()), "gloo", "ends of training data")
        return self._group

    def agreed_response(self, response: Any) -> Any:
        """Return what Lightning is given as the result of ``on_train_batch_start``: -1 if any rank returns it.

        Lightning ends the epoch then. This is a collective over all processes.

        Args:
            response: What the hook has returned on this rank.

        Raises:
            UnevenBatchesError: If some ranks only return -1, and the policy is to raise.
        """
        own, ends = dist.get_rank(), isinstance(response, int) and response == -1
        flags = [rank == own and ends for rank in range(dist.get_world_size())]
        found = begin_any_of_flags(flags, self._create_group())()
        if not any(found):
            return response
        if not all(found):
            text = f"on_train_batch_start returned -1, which ends the epoch, on {ranks_text(_set(found))} only"
            if self._policy == "raise":
                raise UnevenBatchesError(
                    f"uneven_batches='raise', and {text}. Return it on all ranks, for example if"
                    " self.trainer.strategy.reduce_boolean_decision(stops, all=False), or use uneven_batches='stop',"
                    " which ends the epoch on all ranks there."
                )
            self._warn(f"{text}. All ranks end the epoch there (uneven_batches='stop').")
        return -1

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(text)

    def _begin(self, index: int, has_batch: bool) -> Callable[[], bool]:
        own = dist.get_rank()
        lacks = [rank == own and not has_batch for rank in range(dist.get_world_size())]
        finish_exchange = begin_any_of_flags(lacks, self._create_group())

        def finish() -> bool:
            found = finish_exchange()
            if any(found) and not all(found):
                self._end(index, _set(found))
            return not any(found)

        return finish

    def _end(self, num_batches: int, without: list[int]) -> None:
        """Report that the epoch ends after ``num_batches`` batches, because some ranks have no further one.

        Raises:
            UnevenBatchesError: If the policy is to raise, or a rank has no batch at all.
        """
        if num_batches == 0:
            raise UnevenBatchesError(
                f"The training loader of {ranks_text(without)} gives no batch, and those of other ranks do. Give each"
                " rank a part of the data."
            )
        if self._policy == "raise":
            raise UnevenBatchesError(
                f"uneven_batches='raise', and the training data of {ranks_text(without)} end after {num_batches}"
                " batches of the epoch, while other ranks have more. Give all ranks equally many, or use"
                " uneven_batches='stop', which ends the epoch on all ranks there."
            )
        self._warn(
            f"The training data of {ranks_text(without)} end after {num_batches} batches of the epoch, while other"
            " ranks have more. All ranks end the epoch there (uneven_batches='stop'); further epochs may end at"
            " other numbers."
        )


def _set(flags: list[bool]) -> list[int]:
    return [index for index, flag in enumerate(flags) if flag]


def _number(value: float) -> str:
    return "unknown" if math.isinf(value) else f"{value:.0f}"
