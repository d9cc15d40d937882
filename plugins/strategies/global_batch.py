"""Keep the global batch of an optimizer step when a run is resumed on another number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Batch", "rescale_batch"]


@dataclass(frozen=True)
class Batch:
    """Describe the global batch of an optimizer step.

    Args:
        per_rank: Number of samples in one batch of one rank.
        accumulate: Number of batches that are accumulated for one optimizer step.
        num_ranks: Number of ranks that have batches of their own.
    """

    per_rank: int
    accumulate: int
    num_ranks: int

    @property
    def total(self) -> int:
        """Return the number of samples in one optimizer step."""
        return self.per_rank * self.accumulate * self.num_ranks


def rescale_batch(total: int, configured: Batch, given: Batch, can_accumulate: bool = True) -> Batch:
    """Return the batch of a resumed run, so that its optimizer step has the checkpoint's number of samples.

    If the sizes per rank differ from those that the saving run was ``configured`` with, the user wants another global
    batch, and ``given`` is returned. If only the number of ranks differs, the global batch is divided anew, into
    batches per rank that are no larger than the given ones unless ``can_accumulate`` is False.

    Args:
        total: Number of samples in an optimizer step of the checkpoint.
        configured: The batch with which the run that saved the checkpoint was configured.
        given: The batch with which this run is configured.
        can_accumulate: Whether the number of accumulated batches may change.

    Raises:
        ValueError: If ``total`` cannot be divided among the ranks, or among the accumulated batches of a rank if their
            number may not change.
    """
    has_other_sizes = (given.per_rank, given.accumulate) != (configured.per_rank, configured.accumulate)
    if given.total == total or has_other_sizes:
        return given
    if total % given.num_ranks:
        *fitting, last = [str(ranks) for ranks in range(1, total + 1) if total % ranks == 0]
        fitting = [", ".join(fitting), last] if fitting else [last]
        raise ValueError(
            f"The checkpoint's step takes {total} samples, which {given.num_ranks} ranks cannot share. Resume on"
            f" {' or '.join(fitting)} of them, or give another batch size."
        )
    share = total // given.num_ranks
    if can_accumulate:
        per_rank = max(size for size in range(1, given.per_rank + 1) if share % size == 0)
        return Batch(per_rank, share // per_rank, given.num_ranks)
    if share % given.accumulate:
        raise ValueError(
            f"The checkpoint's step takes {total} samples, {share} on each of {given.num_ranks} ranks, which"
            f" {given.accumulate} accumulated batches cannot share. Give another batch size."
        )
    return Batch(share // given.accumulate, given.accumulate, given.num_ranks)
