"""Send each expert at most as many tokens as it has places for, so that no size depends on values.

The ranks exchange the same number of rows in every step, so that they need not tell each other how many tokens each
expert gets, and the host of an accelerator need not wait for these numbers. The tokens of a rank that find no place are
left out, as in GShard (Lepikhin et al., 2020, https://arxiv.org/abs/2006.16668, section 2.2), whose name for the number
of places is the capacity of an expert.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.mesh.autograd_collectives import exchange
from lightning_dist.mesh.deferred_read import DeferredRead
from lightning_dist.techniques.expert_parallel.dispatch import (
    Compute,
    Pairs,
    Routed,
    add_up_weighted,
    all_to_all,
    count_tokens,
    outputs_of,
    select,
)

__all__ = ["LeftOut", "compute_within_capacity", "experts_of_places", "places_of_experts"]


def compute_within_capacity(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    compute: Compute,
    params: Sequence[Tensor],
    num_experts: int,
    capacity: int,
    group: dist.ProcessGroup,
) -> Routed:
    """Compute what ``compute_routed`` does, without tokens for which an expert has no place. This is a collective.

    Args:
        hidden: This rank's tokens, of shape ``(n, features)``.
        index: The experts of each token, of shape ``(n, k)``. An index of ``num_experts`` or more stands for none.
        weights: The weights of these experts, of shape ``(n, k)``.
        compute: Function that computes this rank's experts. It gets zeros in the places that no token takes.
        params: The parameters with which ``compute`` computes.
        num_experts: Number of experts on all ranks together.
        capacity: Largest number of this rank's tokens that an expert computes. All ranks must have the same one, but
            may have different numbers of tokens.
        group: Process group of the ranks of ``ep``.
    """
    ranks = group.size()
    own = num_experts // ranks
    pairs, counts = places_of_experts(index, 0, num_experts, capacity), count_tokens(index, num_experts)
    rows = [own * capacity] * ranks
    move = partial(all_to_all, sent=rows, received=rows)
    tokens = exchange(select(hidden, pairs, group), group, 0, move, move)
    local = experts_of_places(own, capacity, ranks, index)
    results = outputs_of(compute, params, tokens, local, torch.ones_like(local, dtype=weights.dtype))
    results = exchange(results, group, 0, move, move)
    return Routed(add_up_weighted(results, weights, pairs, group), counts)


def places_of_experts(index: Tensor, first: int, number: int, capacity: int) -> Pairs:
    """Return the pair of a token and an expert that takes each place of some experts.

    An expert's places are taken by its first tokens.

    Args:
        index: The experts of each token, of shape ``(n, k)``.
        first: The first of the experts that have places.
        number: Number of the experts that have places.
        capacity: Number of places of each of them.

    Returns:
        ``number * capacity`` pairs: first those of the first expert.
    """
    flat = index.reshape(-1).to(torch.int64) - first
    expert = flat.masked_fill((flat < 0) | (flat >= number), number)
    expert, order = expert.sort(stable=True)
    counts = count_tokens(expert, number + 1)
    position = torch.arange(len(expert), device=index.device) - (counts.cumsum(0) - counts)[expert]
    is_outside = (expert == number) | (position >= capacity)
    place = (expert * capacity + position).masked_fill(is_outside, number * capacity)
    numbers = order.new_full((number * capacity + 1,), len(expert)).scatter_(0, place, order)
    return Pairs(numbers[:-1], index.shape, has_gaps=True)


def experts_of_places(number: int, capacity: int, ranks: int, like: Tensor) -> Tensor:
    """Return the expert of each place that ``ranks`` ranks have filled one after the other.

    Args:
        number: Number of experts that have places.
        capacity: Number of places of each of them on each rank.
        ranks: Number of ranks.
        like: Tensor with the device and dtype of the result.

    Returns:
        Indices of experts, of shape ``(ranks * number * capacity, 1)``.
    """
    experts = torch.arange(number, device=like.device, dtype=like.dtype)
    return experts.view(1, number, 1).expand(ranks, number, capacity).reshape(-1, 1)


class LeftOut:
    """Count the tokens that find no place, without a wait for the device.

    Args:
        capacity: Number of places of an expert for the tokens of this rank.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: Tensor | None = None
        self._read: DeferredRead | None = None
        self._largest = torch.zeros((), dtype=torch.int64)
        self._has_warned = False

    def add(self, num_tokens: Tensor) -> None:
        """Count the tokens of a forward.

        Args:
            num_tokens: For each expert, the number of this rank's tokens that are meant for it.
        """
        counts = torch.stack(((num_tokens - self._capacity).clamp(min=0).sum(), num_tokens.sum()))
        self._counts = counts if self._counts is None else self._counts + counts
        if not self._has_warned:
            self._largest = torch.maximum(self._largest.to(num_tokens.device), num_tokens.max())

    def take(self) -> float:
        """Return the fraction of the tokens since the last call that were left out. The host waits for the device."""
        counts, self._counts = self._counts, None
        left_out, every = (0, 0) if counts is None else counts.tolist()
        return left_out / max(every, 1)

    def warn_once(self) -> None:
        """Warn if tokens were left out in a step before that of the last call, and not again after that."""
        if self._has_warned or self._counts is None:
            return
        if self._read is None:
            self._read = DeferredRead(self._largest)
        elif self._read.is_ready:
            largest, self._read = int(self._read.result()), None
            if largest > self._capacity:
                self._has_warned = True
                warnings.warn(
                    f"expert_capacity={self._capacity}: {largest} tokens of rank {dist.get_rank()} were meant for one"
                    f" expert, and {largest - self._capacity} of them are left out. More such tokens are not reported"
                    " here, but as the metric experts/left_out. To leave none out, use a larger expert_capacity.",
                    stacklevel=2,
                )
