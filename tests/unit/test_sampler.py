"""The sampler has torch's order of samples, and can start anywhere in it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_dist.run.sampler import DealtSampler, ResumableSampler
from lightning_dist.run.telemetry import bytes_in_use, peak_bytes_since, reset_peak

LENGTH = 23


def order(num_replicas: int, epoch: int = 1, num_seen: int | None = None, **kwargs: bool) -> list[list[int]]:
    """Return the indices of each rank, in their order.

    Args:
        num_replicas: Number of ranks.
        epoch: Epoch of the order.
        num_seen: Number of samples of the epoch, over all ranks, after which to start; None: start the epoch, and check
            that the order is that of torch's sampler.
        kwargs: Further arguments of torch's sampler.
    """
    ranks = []
    for rank in range(num_replicas):
        theirs = DistributedSampler(range(LENGTH), num_replicas, rank, seed=3, **kwargs)
        sampler = ResumableSampler.like(theirs)
        if num_seen is None:
            sampler.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(sampler) == list(theirs), "torch's own order"
            sampler.set_epoch(epoch)
        else:
            sampler.enter(epoch, num_seen)
            sampler.set_epoch(epoch + 5)  # Lightning sets its own count of epochs, which must be ignored.
        ranks.append(list(sampler))
    return ranks


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_the_sampler_continues_with_the_rest_of_the_same_order(num_replicas: int, drop_last: bool) -> None:
    whole = order(num_replicas, drop_last=drop_last)
    rest = order(num_replicas, num_seen=2 * num_replicas, drop_last=drop_last)
    assert rest == [indices[2:] for indices in whole]


RECORDED = [
    (11, 3, True, False, 0, [[10, 8, 0, 2], [5, 1, 4, 9], [6, 7, 3, 10]]),
    (11, 3, True, True, 0, [[10, 8, 0], [5, 1, 4], [6, 7, 3]]),
    (11, 3, True, False, 4, [[1, 4, 9], [7, 3, 10], [0, 2, 5]]),
    (11, 2, True, True, 5, [[7, 4, 2], [0, 3, 9]]),
    (3, 8, True, False, 0, [[1], [0], [2], [1], [0], [2], [1], [0]]),
    (3, 8, True, False, 2, [[2], [1], [0], [2], [1], [0], [2], [1]]),
    (3, 8, True, True, 1, [[], [], [], [], [], [], [], []]),
    (11, 3, True, False, 11, [[], [], []]),
    (11, 3, False, False, 0, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 0]]),
    (11, 3, False, True, 0, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    (11, 3, False, False, 4, [[4, 7, 10], [5, 8, 0], [6, 9, 1]]),
    (11, 2, False, True, 5, [[5, 7, 9], [6, 8, 10]]),
    (3, 8, False, False, 0, [[0], [1], [2], [0], [1], [2], [0], [1]]),
    (3, 8, False, False, 2, [[2], [0], [1], [2], [0], [1], [2], [0]]),
    (3, 8, False, True, 1, [[], [], [], [], [], [], [], []]),
    (11, 3, False, False, 11, [[], [], []]),
]
"""For a number of samples, a number of ranks, ``shuffle``, ``drop_last`` and a number of samples that were seen before:
the indices of each rank in epoch 1 with seed 3, recorded when the order was a list that repeated itself for padding."""


@pytest.mark.parametrize(("length", "num_ranks", "shuffle", "drop_last", "num_seen", "recorded"), RECORDED)
def test_runs_resume_in_the_order_of_checkpoints_of_earlier_versions(
    length: int, num_ranks: int, shuffle: bool, drop_last: bool, num_seen: int, recorded: list[list[int]]
) -> None:
    ranks = []
    for rank in range(num_ranks):
        sampler = ResumableSampler(range(length), num_ranks, rank, shuffle, seed=3, drop_last=drop_last)
        sampler.enter(1, num_seen)
        ranks.append(list(sampler))
    assert ranks == recorded
    assert all(type(index) is int for indices in ranks for index in indices)


@pytest.mark.alone
@pytest.mark.parametrize("num_ranks", [1, 2, 16, 1024])
def test_an_epoch_takes_at_most_nine_bytes_for_each_sample(num_ranks: int) -> None:
    cpu, num_samples = torch.device("cpu"), 4_000_000
    torch.randperm(10)  # What torch allocates once is not counted.
    reset_peak(cpu)
    before = bytes_in_use(cpu)
    assert before is not None
    num_drawn = sum(1 for _ in ResumableSampler(range(num_samples), num_ranks, rank=0, seed=3))
    assert num_drawn == -(-num_samples // num_ranks)
    assert (peak_bytes_since(cpu) - before) / num_samples <= 9


def test_another_number_of_ranks_gets_each_remaining_sample_once() -> None:
    first = {index for indices in order(4) for index in indices[:3]}
    rest = [index for indices in order(2, num_seen=12) for index in indices]
    assert set(rest) | first == set(range(LENGTH))
    assert len(set(rest) & first) <= 1, "only one sample may be repeated, to fill up the last row"


def test_workers_prefetch_from_the_place_where_the_sampler_continues() -> None:
    """Workers request indices before Lightning sets the epoch."""
    sampler = ResumableSampler(range(LENGTH), num_replicas=2, rank=1, seed=3)
    sampler.enter(1, 8)
    loader = DataLoader(range(LENGTH), batch_size=2, sampler=sampler, num_workers=1, generator=sampler.worker_seeds)
    batches = iter(loader)
    sampler.set_epoch(0)
    assert [index for batch in batches for index in batch.tolist()] == order(2)[1][4:]
    assert sampler.running_epoch == 1
    assert [index for batch in loader for index in batch.tolist()] == order(2, epoch=0)[1]


def test_the_seeds_of_workers_follow_from_the_epoch_and_the_rank() -> None:
    seeds = set()
    for rank in (0, 1):
        sampler = ResumableSampler(range(LENGTH), num_replicas=2, rank=rank)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            seeds.add(sampler.worker_seeds.initial_seed())
    assert len(seeds) == 4
    sampler.set_epoch(0)
    again = ResumableSampler(range(LENGTH), num_replicas=2, rank=1)
    assert again.worker_seeds.initial_seed() == sampler.worker_seeds.initial_seed()


class Drawn(Sampler[int]):
    """Draw an order by a generator of its own, and by the global ones if it has none."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        random.random()
        order = torch.randperm(LENGTH, generator=self.generator).tolist()
        yield from sorted(order, key=lambda index: random.random()) if self.generator is None else order


def dealt(rank: int, has_generator: bool, num_ranks: int = 2) -> DealtSampler:
    generator = torch.Generator().manual_seed(1) if has_generator else None
    return DealtSampler(Drawn(generator), num_ranks, rank, seed=5)


@pytest.mark.parametrize("has_generator", [True, False])
def test_ranks_see_the_order_of_the_users_sampler_and_resume_in_it(has_generator: bool) -> None:
    before = torch.get_rng_state(), random.getstate()
    samplers = [dealt(rank, has_generator) for rank in range(2)]
    epochs = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        rows = [list(sampler) for sampler in samplers]
        epochs.append([index for row in zip(*rows, strict=True) for index in row][:LENGTH])
        if epoch == 1:
            state = samplers[0].state_of(1)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert all(sorted(order) == list(range(LENGTH)) for order in epochs) and epochs[0] != epochs[1]
    if has_generator:
        own = Drawn(torch.Generator().manual_seed(1))
        assert epochs == [list(own) for _ in range(3)]
    resumed = [dealt(rank, has_generator, num_ranks=3) for rank in range(3)]
    for sampler in resumed:
        sampler.enter(1, 6)
        sampler.enter_state(state)
    rows = [list(sampler) for sampler in resumed]
    assert [index for row in zip(*rows, strict=True) for index in row][: LENGTH - 6] == epochs[1][6:]
