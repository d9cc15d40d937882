"""The sampler has torch's order of samples, and can start anywhere in it."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist.sampler import ResumableSampler

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
