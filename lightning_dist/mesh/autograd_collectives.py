"""Define differentiable collectives between ranks that work on the same batch, such as those of ``tp`` and ``cp``.

Each function runs one exchange in the forward and its adjoint in the backward. The adjoint's own backward is the first
exchange again, so that a backward can be differentiated once more.

They follow Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053, section 3; those that split the
sequence: Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198, section 4.2):

======================  ======================================  ==========================
function                forward                                 backward
======================  ======================================  ==========================
:func:`copy_to`         identity                                sum over the ranks
:func:`sum_from`        sum over the ranks                      identity
:func:`gather`          all ranks' parts along a dimension      this rank's part
:func:`split`           this rank's part along a dimension      all ranks' parts
:func:`gather_to`       all ranks' parts along a dimension      this rank's part of the sum
:func:`scatter_from`    this rank's part of the sum             all ranks' parts
======================  ======================================  ==========================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist._compat import backend_of
from lightning_dist.mesh.collectives import direct_all_gather
from lightning_dist.mesh.traffic import count_all_reduce, count_gather, count_reduce_scatter

__all__ = [
    "copy_all_to",
    "copy_to",
    "exchange",
    "gather",
    "gather_to",
    "part_of_sum",
    "scatter_from",
    "split",
    "sum_from",
    "summed",
    "whole",
]

# torch 2.13 has new names for both collectives.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Exchange = Callable[[Tensor, dist.ProcessGroup, int], Tensor]
"""Function of a tensor, a process group and a dimension, without a backward."""


def copy_to(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``tensor``, the input of split layers, unchanged, and sum its gradient over the ranks in the backward.

    Args:
        tensor: The input of the split layers, which is the same on all ranks.
        group: Process group of the ranks, as for all functions of this module.
    """
    return exchange(tensor, group, 0, _same, summed)


def copy_all_to(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Apply :func:`copy_to` to each of ``tensors``, and sum all of their gradients in one all-reduce.

    A tensor that was not used gets no gradient; all ranks must use the same tensors.
    """
    results: tuple[Tensor, ...] = _CopyAll.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return list(results)


def sum_from(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``tensor``, the output of split layers of which each rank has a summand, over the ranks."""
    return exchange(tensor, group, 0, summed, _same)


def gather(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather ``tensor``, of which each rank has a part along ``dim``; all ranks must use the result identically."""
    return exchange(tensor, group, dim, whole, _part)


def split(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part along ``dim`` of ``tensor``, which is the same on all ranks."""
    return exchange(tensor, group, dim, _part, whole)


def gather_to(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather ``tensor``, the input of split layers, along ``dim``, and reduce-scatter its gradient."""
    return exchange(tensor, group, dim, whole, part_of_sum)


def scatter_from(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter ``tensor``, the output of split layers of which each rank has a summand, along ``dim``."""
    return exchange(tensor, group, dim, part_of_sum, whole)


def exchange(tensor: Tensor, group: dist.ProcessGroup, dim: int, forward: Exchange, backward: Exchange) -> Tensor:
    """Return ``forward(tensor, group, dim)``, whose gradient passes through ``backward``.

    Args:
        tensor: The tensor of this rank.
        group: Process group of the ranks.
        dim: The dimension that both functions are given.
        forward: A linear function that may communicate.
        backward: The adjoint of ``forward``.
    """
    result: Tensor = _Exchange.apply(tensor, group, dim, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, dim: int, forward: Any, backward: Any) -> Tensor:
        ctx.group, ctx.dim, ctx.exchanges = group, dim, (forward, backward)
        result: Tensor = forward(tensor, group, dim)
        if result is tensor:
            return result.view_as(result)
        return result.data  # A view that a function of autograd returns could not be changed in place.

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        # The backward of the gradient's exchange is the forward's exchange.
        forward, backward = ctx.exchanges
        return exchange(gradient, ctx.group, ctx.dim, backward, forward), None, None, None, None


class _CopyAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)  # The gradient of a tensor that was not used is None, rather than zeros.
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [gradient for gradient in gradients if gradient is not None]
        if not used:
            return None, *gradients
        total = sum_from(torch.cat([gradient.reshape(-1) for gradient in used]), ctx.group)
        parts = iter(torch.split(total, [gradient.numel() for gradient in used]))
        return None, *(None if gradient is None else next(parts).view(gradient.shape) for gradient in gradients)


def _same(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return tensor


def summed(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Sum ``tensor`` over the ranks, as :func:`sum_from` does, but without a backward."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    count_all_reduce(total, group)
    dist.all_reduce(total, group=group)
    return total


def _part(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    # A view would keep the memory of the whole tensor for the backward.
    return tensor.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def whole(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather ``tensor`` along ``dim``, as :func:`gather` does, but without a backward."""
    # Backends concatenate along the first dimension, so dim is moved there and back.
    first = tensor.movedim(dim, 0).contiguous()
    chunks = first.new_empty((group.size(), *first.shape))
    count_gather(first, group)
    if backend_of(group) == "gloo":
        direct_all_gather(chunks, first, group)
    else:
        _all_gather(chunks.flatten(0, 1), first, group=group)
    return chunks.flatten(0, 1).movedim(0, dim).contiguous()


def part_of_sum(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter ``tensor`` along ``dim``, as :func:`scatter_from` does, but without a backward."""
    first = tensor.movedim(dim, 0).contiguous()
    chunks = first.view(group.size(), -1, *first.shape[1:])
    count_reduce_scatter(first, group)
    if backend_of(group) == "gloo":  # Gloo's own reduce-scatter sends as many bytes as an all-reduce.
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=group)
        part = received.sum(0)
    else:
        part = torch.empty_like(chunks[0])
        _reduce_scatter(part, first, group=group)
    return part.movedim(0, dim).contiguous()
