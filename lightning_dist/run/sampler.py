"""Order the samples of an epoch so that any number of ranks can resume at any sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from lightning_dist.model.own_generators import GENERATORS, get_state, set_state
from lightning_dist.model.randomness import RngGenerators, unchanged_random_numbers

__all__ = ["DealtSampler", "ResumableSampler"]


class ResumableSampler(DistributedSampler[Any]):
    """Sample in the order of torch's ``DistributedSampler``, and resume in the middle of an epoch.

    The position to resume at counts the samples of all ranks, so that it is valid for another number of ranks: each
    sample that was not seen before is seen once in the rest of the epoch, up to padding or ``drop_last``.

    A shuffled epoch takes 8 bytes for each sample of the dataset, and with 16 ranks or more keeps only those of this
    rank's samples. torch's class makes lists of Python integers, which take seven times as much.

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
        order = self._whole_order()
        rest = order[start:]
        num_rows, surplus = divmod(len(rest), self.num_replicas)
        own, padding = rest[self.rank :: self.num_replicas], order[:0]
        if self.drop_last:
            own = own[:num_rows]
        elif 0 < surplus <= self.rank:  # The last row is filled up from the beginning of the order.
            first = (self.rank - surplus) % len(order)
            padding = order[first : first + 1]
        parts = [own, padding]
        if self.num_replicas >= _MANY:  # The other ranks' indices are freed; the copy takes little beside them.
            parts = [part.clone() if isinstance(part, Tensor) else part for part in parts]
        return _in_pieces(*parts)

    def _whole_order(self) -> Sequence[Any] | Tensor:
        """Return the indices of the running epoch in the order in which all ranks together see them.

        The numbers are those that torch's ``DistributedSampler`` draws for a single rank.
        """
        num_samples = len(self.dataset)  # type: ignore[arg-type]  # torch does not say that it has a length
        if not self.shuffle:
            return range(num_samples)
        return torch.randperm(num_samples, generator=torch.Generator().manual_seed(self.seed + self.running_epoch))


def _in_pieces(*sequences: Sequence[Any] | Tensor) -> Iterator[Any]:
    """Yield the items of ``sequences``, and make Python integers of a few thousand elements of a tensor at a time."""
    for items in sequences:
        for start in range(0, len(items), _PIECE):
            piece = items[start : start + _PIECE]
            yield from piece.tolist() if isinstance(piece, Tensor) else piece


_MANY = 16
"""Number of ranks from which on a rank keeps only a copy of its own indices."""

_PIECE = 4096
"""Number of indices that are Python integers at the same time."""


class DealtSampler(ResumableSampler):
    """Deal the indices of another sampler out to the ranks, so that all ranks together see them in its order.

    All ranks draw the whole order of an epoch. A sampler that draws it with a generator of its own draws what it would
    draw in one process, if it has the same generator on all ranks. One that uses the generators of Python, NumPy or
    torch finds them seeded by the seed and the epoch, on all ranks and after a resume alike.

    Args:
        sampler: The user's sampler, which has a length.
        num_replicas: Number of ranks with different samples.
        rank: Index of this rank among them.
        seed: Seed that is the same on all ranks.
    """

    def __init__(self, sampler: Any, num_replicas: int, rank: int, seed: int = 0) -> None:
        super().__init__(sampler, num_replicas=num_replicas, rank=rank, shuffle=False, seed=seed)
        self._before: dict[str, Any] | None = None
        self._entered: dict[str, Any] | None = None

    @classmethod
    def like(cls, sampler: DistributedSampler[Any], dataset: Any = None) -> Self:
        """Create a sampler with the settings and the epoch of ``sampler``, which is a :class:`DealtSampler`.

        Args:
            sampler: Sampler to imitate.
            dataset: The user's sampler of the new one; None: that of ``sampler``.
        """
        new = cls(sampler.dataset if dataset is None else dataset, sampler.num_replicas, sampler.rank, sampler.seed)
        new.set_epoch(sampler.epoch)
        return new

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in the user's sampler if it has such a method."""
        super().set_epoch(epoch)
        self._set_epoch_of_users(epoch)

    @property
    def _users(self) -> Any:
        """Return the user's sampler, which torch's class takes for a dataset, as it has a length."""
        return self.dataset

    def _set_epoch_of_users(self, epoch: int) -> None:
        if callable(getattr(self._users, "set_epoch", None)):
            self._users.set_epoch(epoch)

    def state_of(self, epoch: int) -> dict[str, Any]:
        """Return the state of the user's sampler from which it draws the order of ``epoch``, the running or next one.

        The state consists of those of the generators that are attributes of it or of samplers in it, and of what its
        ``state_dict`` returns, if it has one.
        """
        if self._entered is not None:
            return self._entered
        return self._now() if self._before is None or epoch != self.running_epoch else self._before

    def enter_state(self, state: dict[str, Any]) -> None:
        """Make the next iteration draw from a state that :meth:`state_of` has returned."""
        self._entered = state

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the user's sampler to a state that :meth:`state_of` has returned, at once."""
        for generator, of_generator in zip(_generators_in(self._users), state["generators"], strict=True):
            set_state(generator, of_generator)
        if "sampler" in state:
            self._users.load_state_dict(state["sampler"])

    def _now(self) -> dict[str, Any]:
        state: dict[str, Any] = {"generators": [get_state(generator) for generator in _generators_in(self._users)]}
        if callable(getattr(self._users, "state_dict", None)):
            state["sampler"] = copy.deepcopy(self._users.state_dict())
        return state

    def _whole_order(self) -> list[Any]:
        entered, self._entered = self._entered, None
        if entered is not None:
            self.set_state(entered)
        self._set_epoch_of_users(self.running_epoch)
        self._before = self._now()
        with unchanged_random_numbers():
            RngGenerators(torch.device("cpu")).seed(hash((self.seed, self.running_epoch)) % 2**63)
            # What follows the last index, such as drawing further numbers, does not run in one process either.
            return list(islice(self._users, len(self._users)))


def _generators_in(sampler: Any) -> list[Any]:
    """Return the generators that are attributes of ``sampler``, or of samplers in its attributes, each once."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    rest = [sampler]
    while rest:
        owner = rest.pop()
        seen.add(id(owner))
        for value in getattr(owner, "__dict__", {}).values():
            for item in value if isinstance(value, list | tuple) and len(value) <= _MOST_SAMPLERS else (value,):
                if isinstance(item, (torch.Generator, *GENERATORS)):
                    found[id(item)] = item
                elif isinstance(item, Sampler) and id(item) not in seen:
                    rest.append(item)
    return list(found.values())


_MOST_SAMPLERS = 100
"""Length of the longest list that may hold samplers; longer ones hold indices."""
