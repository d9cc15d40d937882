"""What tensor-parallel ranks exchange in a forward, each with its counterpart in the backward.

After Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053), section 3:

=================  ======================================  =========================
function           forward                                 backward
=================  ======================================  =========================
:func:`copy_to`    as it is                                sum over the ranks
:func:`sum_from`   sum over the ranks                      as it is
:func:`gather`     all ranks' parts along a dimension      this rank's part
=================  ======================================  =========================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["copy_to", "gather", "sum_from"]

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on


def copy_to(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a part of the model that is split: the same input on all ranks, whose gradient is the sum of theirs."""
    return _exchange(tensor, group, 0, _same, _summed)


def sum_from(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a part of the model that is split: each rank has a summand."""
    return _exchange(tensor, group, 0, _summed, _same)


def gather(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The whole of a tensor of which each rank has a part along ``dim``, for all ranks to go on with alike."""
    return _exchange(tensor, group, dim, _gathered, _part)


def _exchange(tensor: Tensor, group: dist.ProcessGroup, dim: int, forward: Any, backward: Any) -> Tensor:
    result: Tensor = _Exchange.apply(tensor, group, dim, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, dim: int, forward: Any, backward: Any) -> Tensor:
        ctx.group, ctx.dim, ctx.exchange = group, dim, backward
        result: Tensor = forward(tensor, group, dim)
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.exchange(gradient, ctx.group, ctx.dim), None, None, None, None


def _same(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return tensor


def _summed(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _part(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return tensor.chunk(group.size(), dim)[group.rank()].contiguous()


def _gathered(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    # Concatenated along the first dimension, which is what the backends do, and put in place afterwards.
    first = tensor.movedim(dim, 0).contiguous()
    whole = first.new_empty((group.size() * first.size(0), *first.shape[1:]))
    _all_gather(whole, first, group=group)
    return whole.movedim(0, dim).contiguous()
