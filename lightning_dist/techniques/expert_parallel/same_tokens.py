"""Compute the experts that a rank has for tokens that all ranks have, and add up the results over the ranks.

This is how the experts of a mixture are split over ``tp``: the ranks have the same tokens, so that none travels. A
layer needs one all-reduce of the tokens in the forward and one in the backward, as a split feed-forward network does in
Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_dist.mesh.autograd_collectives import copy_all_to, copy_to, gather, split, sum_from
from lightning_dist.techniques.expert_parallel.capacity import experts_of_places, places_of_experts
from lightning_dist.techniques.expert_parallel.dispatch import Compute, Pairs, add_up_weighted, outputs_of, select

__all__ = ["compute_own_dense", "compute_own_routed", "gather_tokens", "split_tokens"]


def compute_own_routed(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    compute: Compute,
    params: Sequence[Tensor],
    num_experts: int,
    capacity: int | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts. This is a collective over ``group``.

    Args:
        hidden: The tokens, of shape ``(n, features)``, which are the same on all ranks.
        index: The experts of each token, of shape ``(n, k)``. An index of ``num_experts`` or more stands for no expert.
        weights: The weights of each token's experts, of shape ``(n, k)``.
        compute: Function that computes this rank's experts.
        params: The parameters with which ``compute`` computes.
        num_experts: Number of experts on all ranks together.
        capacity: Largest number of tokens that an expert computes; None: each computes all of its tokens.
        group: Process group of the ranks.
    """
    number = num_experts // group.size()
    first = group.rank() * number
    if weights.requires_grad:
        hidden, weights = copy_all_to([hidden, weights], group)
    else:
        hidden = copy_to(hidden, group)
    if capacity is None:
        rows, choices = ((index >= first) & (index < first + number)).nonzero(as_tuple=True)
        pairs = Pairs(rows * index.size(-1) + choices, index.shape)
        own_index = index[rows, choices][:, None] - first
    else:
        pairs = places_of_experts(index, first, number, capacity)
        own_index = experts_of_places(number, capacity, 1, index)
    ones = torch.ones(own_index.shape, dtype=weights.dtype, device=weights.device)
    results = outputs_of(compute, params, select(hidden, pairs, group), own_index, ones)
    return sum_from(add_up_weighted(results, weights, pairs, group), group)


def compute_own_dense(hidden: Tensor, compute: Compute, num_experts: int, group: dist.ProcessGroup) -> Tensor:
    """Return each expert's outputs of tokens that are grouped by expert. This is a collective over ``group``.

    Args:
        hidden: The tokens, of shape ``(num_experts * n, features)``: first those of the first expert. They are the same
            on all ranks.
        compute: Function of tokens that are grouped by this rank's experts, which returns outputs of the same shape.
        num_experts: As for :func:`compute_own_routed`.
        group: As for :func:`compute_own_routed`.
    """
    part = copy_to(hidden, group).chunk(group.size())[group.rank()]
    return gather(compute(part), group, 0)


def split_tokens(
    given: Sequence[Tensor], num_groups: int, num_experts: int, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Return this rank's part of tokens that all ranks have. :func:`gather_tokens` is the inverse.

    Tokens for no expert are appended so that the ranks have equally many.

    Args:
        given: The hidden states of the tokens, of shape ``(num_groups * n, features)``, and if they are routed, their
            experts and weights, of shape ``(n, k)``. They are the same on all ranks.
        num_groups: Number of groups of tokens, each of which is split: 1 if the tokens are routed; else the number of
            experts, by which the tokens are grouped.
        num_experts: Number of experts, which stands for no expert where the experts of a token are given.
        group: Process group of the ranks.
    """
    length = len(given[0]) // num_groups
    added = max(-(-length // group.size()), 1) * group.size() - length
    parts = []
    for tensor in given:
        value = 0 if tensor.is_floating_point() else num_experts
        padded = functional.pad(tensor.view(num_groups, length, -1), (0, 0, 0, added), value=value)
        parts.append(split(padded, group, 1).flatten(0, 1))
    return tuple(parts)


def gather_tokens(output: Tensor, num_groups: int, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Return the outputs of all ranks' parts from :func:`split_tokens`. This is a collective over ``group``.

    Args:
        output: The outputs of this rank's part, of shape ``(num_groups * m, features)``.
        num_groups: As for :func:`split_tokens`.
        num_tokens: Number of tokens before they were split, ``num_groups * n``.
        group: Process group of the ranks.
    """
    outputs = gather(output.view(num_groups, -1, output.size(-1)), group, 1)
    return outputs.narrow(1, 0, num_tokens // num_groups).flatten(0, 1)
