"""Order the samples of an epoch so that any number of ranks can resume at any sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils.data import DistributedSampler

__all__ = ["ResumableSampler"]


class ResumableSampler(DistributedSampler[Any]):
    """Sample in the order of torch's ``DistributedSampler``, and resume in the middle of an epoch.

    The position to resume at counts the samples of all ranks, so that it is valid for another number of ranks: each
    sample that was not seen before is seen once in the rest of the epoch, up to padding or ``drop_last``.

    Attributes:
        running_epoch: Epoch of the current iteration, even if ``set_epoch`` has already chosen the next one.
        worker_seeds: Generator for ``DataLoader(generator=...)``, seeded for every epoch and rank. Workers therefore
            draw the same numbers however often training was interrupted before the epoch, and the DataLoader draws
            nothing from the default generator, which training uses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entry: tuple[int, int] | None = None  # It holds the epoch, and the number of samples seen by all ranks.
        self.running_epoch = 0
        self.worker_seeds = torch.Generator()
        self.set_epoch(0)

    @classmethod
    def like(cls, sampler: DistributedSampler[Any], dataset: Any = None) -> Self:
        """Create a sampler with the settings and the epoch of ``sampler``.

        Args:
            sampler: Sampler to imitate.
            dataset: Dataset of the new sampler; None: that of ``sampler``.
        """
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
        """Set the epoch of the next iteration, and seed ``worker_seeds`` for it."""
        super().set_epoch(epoch)
        self.worker_seeds.manual_seed(hash((self.seed, epoch, self.rank)) % 2**63)

    def enter(self, epoch: int, num_seen: int) -> None:
        """Make the next iteration resume ``epoch`` after its first ``num_seen`` samples, counted over all ranks."""
        self.set_epoch(epoch)
        self._entry = (epoch, num_seen)
        self.running_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over this rank's indices."""
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
