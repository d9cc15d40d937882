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

from lightning_dist.autograd_collectives import copy_all_to, copy_to, gather, sum_from
from lightning_dist.expert_parallel.dispatch import Compute, without_tokens

__all__ = ["compute_own_dense", "compute_own_routed"]


def compute_own_routed(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    compute: Compute,
    params: Sequence[Tensor],
    num_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts. This is a collective over ``group``.

    Args:
        hidden: The tokens, of shape ``(n, features)``, which are the same on all ranks.
        index: As for :func:`~lightning_dist.expert_parallel.dispatch.compute_routed`, and so are the others.
        weights: The weights of each token's experts, of shape ``(n, k)``.
        compute: Function that computes this rank's experts.
        params: The parameters with which ``compute`` computes.
        num_experts: Number of experts on all ranks together.
        group: Process group of the ranks.
    """
    number = num_experts // group.size()
    first = group.rank() * number
    if weights.requires_grad:
        hidden, weights = copy_all_to([hidden, weights], group)
    else:
        hidden = copy_to(hidden, group)
    rows, choices = ((index >= first) & (index < first + number)).nonzero(as_tuple=True)
    tokens, of_tokens = hidden.index_select(0, rows), weights[rows, choices][:, None]
    if len(rows):
        results = compute(tokens, index[rows, choices][:, None] - first, torch.ones_like(of_tokens))
    else:
        results = without_tokens(tokens, params)
    weighted = (results * of_tokens).to(hidden.dtype)
    return sum_from(torch.zeros_like(hidden).index_add(0, rows, weighted), group)


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
