"""Choose, describe and keep the global batch: the samples of an optimizer step over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader

from lightning_dist.plugins._compat import changes_accumulation, configured_accumulation, training_loaders

__all__ = ["Batch", "global_batch", "per_rank_batch_size", "rescale_batch", "set_global_batch"]


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

    def describe(self) -> str:
        """Return the number of samples and its factors, such as ``16 samples = 4 x 2 accumulated x 2 ranks``."""
        accumulated = f" x {self.accumulate} accumulated" if self.accumulate > 1 else ""
        return f"{self.total:,} samples a step = {self.per_rank:,}{accumulated} x {self.num_ranks} data-parallel ranks"


def per_rank_batch_size(global_batch_size: int, trainer: Trainer | None) -> int:
    """Return the number of samples in a batch of a rank, so that an optimizer step has ``global_batch_size`` of them.

    The global batch is divided by the number of accumulated batches, and by the number of ranks that read different
    samples: all ranks under data parallelism and sharding, and fewer under tensor, context or pipeline parallelism. It
    works with every strategy of Lightning, too.

    Args:
        global_batch_size: Number of samples in an optimizer step over all ranks.
        trainer: Trainer that reads the data, such as ``self.trainer`` of a LightningDataModule; None: a single process.

    Raises:
        ValueError: If ``global_batch_size`` is not a positive multiple of the number of batches in a step.
    """
    num_ranks = ((trainer.distributed_sampler_kwargs if trainer else None) or {}).get("num_replicas", 1)
    accumulate = configured_accumulation(trainer) if trainer else 1
    parts = num_ranks * accumulate
    if global_batch_size < 1 or global_batch_size % parts:
        below = global_batch_size // parts * parts
        fitting = " or ".join(str(size) for size in (below, below + parts) if size > 0)
        accumulated = f" with accumulate_grad_batches={accumulate}" if accumulate > 1 else ""
        raise ValueError(
            f"global_batch_size={global_batch_size} cannot be split evenly over {num_ranks} data-parallel rank(s)"
            f"{accumulated}: use {fitting}."
        )
    return global_batch_size // parts


def set_global_batch(loader: Any, global_batch_size: int, trainer: Trainer) -> None:
    """Change the batch size of a training loader, so that an optimizer step has ``global_batch_size`` samples.

    Args:
        loader: Loader that Lightning is about to use, which is changed in place.
        global_batch_size: Number of samples in an optimizer step over all ranks.
        trainer: Trainer that uses the loader.

    Raises:
        ValueError: If the samples cannot be divided among the ranks and the accumulated batches.
        MisconfigurationException: If the loader's batches cannot be changed, or the number of accumulated ones varies.
    """
    if changes_accumulation(trainer):
        raise MisconfigurationException(
            f"global_batch_size={global_batch_size} with a GradientAccumulationScheduler, which changes the number of"
            " samples in a step: leave one of the two out."
        )
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batches) is not BatchSampler:
        raise MisconfigurationException(
            f"global_batch_size={global_batch_size}: the batches of the training loader ({type(loader).__name__} with"
            f" {type(batches).__name__} as batch_sampler) cannot be changed. Leave the argument out, and divide the"
            f" batch where the loader is made, by lightning_dist.per_rank_batch_size({global_batch_size},"
            " self.trainer)."
        )
    batches.batch_size = per_rank_batch_size(global_batch_size, trainer)


def global_batch(trainer: Trainer) -> Batch | None:
    """Return the batch of an optimizer step of a fit that has begun; None if it has several loaders or an unknown size.

    Args:
        trainer: A Trainer whose training loaders have been made.
    """
    loaders = training_loaders(trainer)
    if len(loaders) != 1:
        return None
    batches = getattr(loaders[0], "batch_sampler", None)
    size = getattr(batches, "batch_size", None) or getattr(loaders[0], "batch_size", None)
    if not isinstance(size, int):
        return None
    num_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
    return Batch(size, configured_accumulation(trainer), num_ranks)


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
