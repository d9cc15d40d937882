"""The same global batch on another number of ranks: what an optimizer step means does not change with them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Batch", "rescale_batch"]


@dataclass(frozen=True)
class Batch:
    """What an optimizer step takes.

    Args:
        per_rank: Samples of a rank's batch.
        accumulate: Batches a step.
        num_ranks: That have batches of their own.
    """

    per_rank: int
    accumulate: int
    num_ranks: int

    @property
    def total(self) -> int:
        """Samples of a step."""
        return self.per_rank * self.accumulate * self.num_ranks


def rescale_batch(total: int, configured: Batch, given: Batch, can_accumulate: bool = True) -> Batch:
    """The batch of a run that is resumed with the sizes ``given`` for each rank.

    Where these are not what the run was ``configured`` with before, another step is meant, and taken. The same sizes on
    another number of ranks would change the step; instead it is divided anew, into batches that are no larger.

    Args:
        total: Samples of the checkpoint's step.
        configured: What the run that saved it was given, and the number of its ranks.
        given: What this one is given.
        can_accumulate: Whether the number of accumulated batches may change.

    Raises:
        ValueError: If a step cannot be divided by the number of ranks.
    """
    has_other_sizes = (given.per_rank, given.accumulate) != (configured.per_rank, configured.accumulate)
    if given.total == total or has_other_sizes:
        return given
    if total % given.num_ranks:
        fitting = [str(ranks) for ranks in range(1, total + 1) if total % ranks == 0]
        raise ValueError(
            f"The checkpoint's step takes {total} samples, which {given.num_ranks} ranks cannot share. Resume on"
            f" {', '.join(fitting[:-1])} or {fitting[-1]} of them, or give another batch size."
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
