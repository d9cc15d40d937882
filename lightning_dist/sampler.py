"""Which sample comes when: one order for all ranks, which any number of ranks can enter anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils.data import DistributedSampler

__all__ = ["ResumableSampler"]


class ResumableSampler(DistributedSampler[Any]):
    """The order of torch's ``DistributedSampler``, which can be entered in the middle of an epoch.

    Where it is entered counts the samples of all ranks, so that it means the same to another number of them: what was
    seen is not seen again in this epoch, and what was not is.

    Attributes:
        running_epoch: Whose order is being given, whatever epoch was set since to come next.
        worker_seeds: For ``DataLoader(generator=...)``: seeded anew for every epoch and rank, so that workers draw the
            same however often training was interrupted before the epoch, and nothing from training's own generator.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entry: tuple[int, int] | None = None  # epoch, samples
        self.running_epoch = 0
        self.worker_seeds = torch.Generator()
        self.set_epoch(0)

    @classmethod
    def like(cls, sampler: DistributedSampler[Any], dataset: Any = None) -> Self:
        """One that splits ``dataset``, by default the same, as ``sampler`` does."""
        new = cls(
            sampler.dataset if dataset is None else dataset,
            num_replicas=sampler.num_replicas,
            rank=sampler.rank,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        new.set_epoch(sampler.epoch)
        return new

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch's order comes next."""
        super().set_epoch(epoch)
        self.worker_seeds.manual_seed(hash((self.seed, epoch, self.rank)) % 2**63)

    def enter(self, epoch: int, num_seen: int) -> None:
        """Let the next iteration be over ``epoch``, whatever is set, without its first ``num_seen`` samples."""
        self.set_epoch(epoch)
        self._entry = (epoch, num_seen)
        self.running_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """This rank's indices."""
        self.running_epoch, start = self._entry or (self.epoch, 0)
        self._entry = None
        whole: DistributedSampler[Any] = DistributedSampler(
            self.dataset, num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed
        )
        whole.set_epoch(self.running_epoch)
        order = list(whole)
        rest = order[start:]
        surplus = len(rest) % self.num_replicas
        if surplus and self.drop_last:
            rest = rest[:-surplus]
        elif surplus:
            missing = self.num_replicas - surplus
            rest += (order * math.ceil(missing / len(order)))[:missing]
        return iter(rest[self.rank :: self.num_replicas])
