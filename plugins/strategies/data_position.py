"""Save a run's position in its data, so that it resumes there even within an epoch and on another number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Sized
from dataclasses import asdict, fields
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_dist.checkpoint import NUM_SEEN
from lightning_dist.plugins._compat import (
    changes_accumulation,
    configured_accumulation,
    mode_of_loaders,
    scheduled_accumulation,
)
from lightning_dist.plugins._compat.progress import count_batches, training_progress
from lightning_dist.plugins.global_batch import Batch, rescale_batch
from lightning_dist.run.sampler import DealtSampler, ResumableSampler

__all__ = ["NUM_SEEN", "LoaderPosition", "deal_out", "give_own_generator", "make_resumable"]

EPOCH = "epoch"
_ORDER = "order"


def make_resumable(loader: Any, trainer: Trainer) -> LoaderPosition | None:
    """Give ``loader`` a ``state_dict`` and ``load_state_dict``, which Lightning calls, for its position in the data.

    The position counts the samples of all ranks. It requires a ``DistributedSampler``, whose order can be entered
    anywhere; Lightning gives one to every loader of a map-style dataset for which the user has set no sampler. Other
    loaders are unchanged. Loaders with a ``state_dict`` of their own (torchdata's StatefulDataLoader) are only given
    the shared seed and the epoch before they load it. This is a collective over all processes.

    Args:
        loader: Loader of a fit's training batches, which is changed in place.
        trainer: A Trainer in a fit whose loops have been restored.

    Returns:
        The position; None if this project does not keep a position for the loader.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = _shared_order(getattr(batches, "sampler", None))
    if not isinstance(loader, DataLoader) or batches is None or sampler is None:
        return None
    sampler.seed = trainer.strategy.broadcast(sampler.seed)  # The ranks may have been seeded differently.
    sampler.set_epoch(training_progress(trainer).epoch)
    if isinstance(sampler, DealtSampler):  # The generators of the user's samplers may differ as well.
        sampler.set_state(trainer.strategy.broadcast(sampler.state_of(sampler.epoch)))
    if hasattr(type(loader), "state_dict"):
        batches.sampler = sampler
        return None
    if type(batches) is not BatchSampler:
        return None
    resumable = batches.sampler = (
        DealtSampler.like(sampler) if isinstance(sampler, DealtSampler) else ResumableSampler.like(sampler)
    )
    if loader.generator is None:
        loader.generator = resumable.worker_seeds
    position = LoaderPosition(trainer, batches, resumable)
    loader.state_dict, loader.load_state_dict = position.state_dict, position.load_state_dict
    return position


def _shared_order(sampler: Any) -> DistributedSampler[Any] | None:
    """Return a sampler that divides one order of the samples among the ranks; None if ``sampler`` is of another kind.

    Lightning wraps torchdata's RandomSampler in a sampler with which each rank would draw an order of its own. For
    such a sampler, a new one that all ranks share is returned.
    """
    wrapped: Any = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    if type(wrapped).__module__.startswith("torchdata.") and type(wrapped).__name__ == "RandomSampler":
        return ResumableSampler.like(sampler, wrapped.data_source)
    return sampler if type(sampler) in (DistributedSampler, ResumableSampler, DealtSampler) else None


def deal_out(sampler: Any, dataset: Any, num_replicas: int, rank: int) -> DistributedSampler[Any] | None:
    """Return a sampler that deals the indices of a training loader's sampler out to the ranks, in the same order.

    Args:
        sampler: The sampler of the user's loader.
        dataset: The dataset of the loader.
        num_replicas: Number of ranks with different samples.
        rank: Index of this rank among them.

    Returns:
        The sampler; None if the order is random in each run, so that all ranks can draw one of their own, or if the
        sampler has no length.
    """
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    if type(sampler) is SequentialSampler:
        return DistributedSampler(dataset, num_replicas, rank, shuffle=False, seed=seed)
    if type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement:
        return None if sampler.num_samples == len(dataset) else DealtSampler(sampler, num_replicas, rank, seed)
    is_of_torchdata = type(sampler).__module__.startswith("torchdata.") and type(sampler).__name__ == "RandomSampler"
    if is_of_torchdata or not isinstance(sampler, Sized) or math.isinf(len(sampler)):
        return None
    return DealtSampler(sampler, num_replicas, rank, seed)


def give_own_generator(loader: Any) -> None:
    """Give ``loader`` a generator of its own for its workers' seeds, so that it does not advance training's."""
    if isinstance(loader, DataLoader) and loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())


class LoaderPosition:
    """Compute a loader's position in its data from the Trainer's count of batches.

    Args:
        trainer: The Trainer of the fit, which counts the batches.
        batches: The loader's batch sampler, whose ``batch_size`` a resume may change.
        sampler: The sampler inside ``batches``, whose seed, epoch and first sample a resume sets.
    """

    def __init__(self, trainer: Trainer, batches: BatchSampler, sampler: ResumableSampler) -> None:
        self._trainer = trainer
        self._batches = batches
        self._sampler = sampler
        self._entered_at = (0, 0, 0)  # The numbers are the epoch, the samples seen in it, and the batches.
        self._given = self._batch
        self._is_recounted = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the sizes of the batch and of the dataset to which it refers."""
        epoch, num_seen, num_batches = self._now()
        order = {_ORDER: self._sampler.state_of(epoch)} if isinstance(self._sampler, DealtSampler) else {}
        return {
            **order,
            EPOCH: epoch,
            NUM_SEEN: num_seen,
            "num_batches": num_batches,
            "row": self._batch_size_of_all_ranks,
            "seed": self._sampler.seed,
            "num_samples": self._num_samples,
            "step": self._batch.total,
            **asdict(self._given),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position, with the global batch that the checkpoint had.

        Raises:
            ValueError: If that batch cannot be divided among the ranks of this run.
        """
        if state["num_samples"] != self._num_samples:
            rank_zero_warn(
                f"The dataset had {state['num_samples']} samples when the checkpoint was saved, and has"
                f" {self._num_samples} now: the rest of this epoch skips as many samples as were seen, but not the same"
                " ones."
            )
        self._keep_global_batch(state["step"], Batch(**{field.name: state[field.name] for field in fields(Batch)}))
        num_batches = state["num_batches"] * state["row"] // self._batch_size_of_all_ranks
        if num_batches != state["num_batches"]:
            count_batches(self._trainer, num_batches)
            self._is_recounted = True
        self._entered_at = (state[EPOCH], state[NUM_SEEN], num_batches)
        self._sampler.seed = state["seed"]
        self._sampler.enter(state[EPOCH], state[NUM_SEEN])
        if isinstance(self._sampler, DealtSampler) and _ORDER in state:
            self._sampler.enter_state(state[_ORDER])

    def on_train_start(self) -> None:
        """Correct the counts and sizes that Lightning has set since the position was loaded."""
        epoch, _, num_batches = self._entered_at
        if self._is_recounted:  # If the loader was made early, Lightning has restored the checkpoint's counts since.
            count_batches(self._trainer, num_batches)
        if changes_accumulation(self._trainer) and num_batches:  # The callback sets it when an epoch begins.
            self._trainer.accumulate_grad_batches = scheduled_accumulation(self._trainer, epoch)

    @property
    def given_size(self) -> int:
        """Return the number of samples in a batch of a rank, as the user gave it."""
        return self._given.per_rank

    def resize_like(self, other: LoaderPosition) -> None:
        """Set the batch size to that of ``other``, which a resume has set for the loader of an earlier epoch."""
        self._given = other._given
        self._batches.batch_size = other._batches.batch_size

    @property
    def _batch(self) -> Batch:
        # If a GradientAccumulationScheduler sets the number of accumulated batches, it is not a part of the position.
        accumulate = 1 if changes_accumulation(self._trainer) else configured_accumulation(self._trainer)
        return Batch(self._batches.batch_size, accumulate, self._sampler.num_replicas)

    def _keep_global_batch(self, total: int, configured: Batch) -> None:
        is_scheduled = changes_accumulation(self._trainer)
        is_automatic = self._trainer.lightning_module.automatic_optimization
        batch = rescale_batch(total, configured, self._given, is_automatic and not is_scheduled)
        if batch.total != total and not is_scheduled:
            rank_zero_warn(
                f"A step took {total} samples when the checkpoint was saved, and takes {batch.total} now, because the"
                f" batch size of a rank is {batch.per_rank} (it was {configured.per_rank}) and"
                f" accumulate_grad_batches={batch.accumulate} (it was {configured.accumulate})."
            )
        if batch != self._batch:
            self._batches.batch_size = batch.per_rank
            if not is_scheduled:
                self._trainer.accumulate_grad_batches = batch.accumulate
            rank_zero_info(
                f"A step takes {total} samples as before, on {batch.num_ranks} ranks: {batch.per_rank} a batch,"
                f" accumulate_grad_batches={batch.accumulate}."
            )

    @property
    def _num_samples(self) -> int:
        return len(cast(Sized, self._sampler.dataset))

    @property
    def _batch_size_of_all_ranks(self) -> int:
        """Return the number of samples in one batch of all ranks together."""
        return self._batch.per_rank * self._batch.num_ranks

    def _now(self) -> tuple[int, int, int]:
        """Return the epoch, the number of its samples that all ranks have seen, and of this rank's finished batches."""
        progress = training_progress(self._trainer)
        if not progress.has_begun:
            return progress.epoch, 0, 0
        # Before an epoch's first batch, the sampler may not have been asked for its order yet.
        epoch = self._sampler.running_epoch if progress.num_batches else progress.epoch
        if progress.is_done:
            return epoch + 1, 0, 0
        entered_epoch, num_seen, batches_before = self._entered_at
        if entered_epoch != epoch:
            num_seen = batches_before = 0
        num_batches = progress.num_batches - progress.in_window
        num_seen += (num_batches - batches_before) * self._batch_size_of_all_ranks
        num_samples = len(self._batches) * self._batch_size_of_all_ranks
        # Where an epoch has several loaders, the shorter ones restart within it, or give no more batches.
        ends = mode_of_loaders(self._trainer) == "max_size"
        return epoch, min(num_seen, num_samples) if ends else num_seen % num_samples, num_batches
