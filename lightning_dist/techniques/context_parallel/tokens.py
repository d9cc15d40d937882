"""Distribute the tokens of a sequence over ranks, and exchange them.

The number of tokens need not divide by the number of ranks: the last parts are filled up with zeros, which are dropped
again before attention and at the end of a chain of blocks. Between these points, blocks compute token by token, so that
the added tokens change nothing.

Gradients: all ranks compute the same loss from the gathered hidden states, and the gradients of parameters are averaged
over ``cp`` like over all ranks that share them. The gradients inside of blocks are therefore multiplied by the number
of ranks when they enter a chain in the backward (:meth:`Tokens.gather`), and divided by it where they leave the chain
(:meth:`Tokens.split` and :meth:`Tokens.copy_to`). The average of the parts of a block's gradient is then their sum, and
a parameter that is used inside and outside of blocks gets the right gradient as well.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.mesh import autograd_collectives
from lightning_dist.mesh.autograd_collectives import exchange
from lightning_dist.mesh.traffic import count_all_to_all

__all__ = ["Tokens"]


class Tokens:
    """Describe which tokens of a sequence each rank has.

    Each rank has consecutive tokens; if ``is_balanced``, it has two pieces, the one as far from the beginning of the
    sequence as the other from its end, so that causal attention is as much work on each rank.

    Args:
        length: Number of tokens of the sequence.
        group: Process group of the ranks of ``cp``.
        is_balanced: Whether each rank has two pieces.
    """

    def __init__(self, length: int, group: dist.ProcessGroup, is_balanced: bool) -> None:
        self.length = length
        self.group = group
        size, rank = group.size(), group.rank()
        num_pieces = 2 if is_balanced else 1
        self.piece = -(-length // (num_pieces * size))
        """Number of tokens of a piece; the last pieces may be shorter, and are filled up."""
        self.own = num_pieces * self.piece
        """Number of tokens of each rank, with those that are added."""
        self.pieces = (rank, 2 * size - 1 - rank) if is_balanced else (rank,)
        """The numbers of this rank's pieces of the sequence."""
        self._is_balanced = is_balanced

    @property
    def are_too_few(self) -> bool:
        """Return whether the sequence is too short to be split: a single token looks like a dimension of size 1."""
        return self.own < 2 or self.length < self.group.size()

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of ``tensor``, which is the same on all ranks; ``dim`` must be negative."""
        return _scale_gradient(exchange(tensor, self.group, dim, self._part, self._whole), 1 / self.group.size())

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tokens of all ranks along ``dim``, which must be negative, for code that runs on all ranks."""
        return exchange(_scale_gradient(tensor, self.group.size()), self.group, dim, self._whole, self._part)

    def copy_to(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, which all ranks have and blocks use whole, and average its gradient over the ranks."""
        return autograd_collectives.copy_to(_scale_gradient(tensor, 1 / self.group.size()), self.group)

    def sum(self, value: Tensor) -> Tensor:
        """Sum ``value``, which each rank has computed from its own tokens, for code that runs on all ranks."""
        return autograd_collectives.sum_from(_scale_gradient(value, self.group.size()), self.group)

    def gather_to(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tokens of all ranks along ``dim``, which must be negative, for attention inside of a block."""
        return exchange(tensor, self.group, dim, self._whole, self._part_of_sum)

    def part(self, tensor: Tensor, dim: int, fill: float = 0.0) -> Tensor:
        """Return this rank's tokens along ``dim`` of ``tensor``, without an exchange of gradients.

        Args:
            tensor: A tensor that is the same on all ranks.
            dim: The negative dimension of the tokens.
            fill: Value of the added tokens.
        """
        parts = [self._piece_of(tensor, dim, number, fill) for number in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _piece_of(self, tensor: Tensor, dim: int, number: int, fill: float = 0.0) -> Tensor:
        start = min(number * self.piece, self.length)
        end = min(start + self.piece, self.length)
        return _filled(tensor.narrow(dim, start, end - start), dim, self.piece, fill)

    def _part(self, tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        part = self.part(tensor, dim)
        # A view would keep the memory of the whole sequence for the backward.
        return part.clone(memory_format=torch.contiguous_format) if len(self.pieces) == 1 else part

    def _whole(self, tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        if not self._is_balanced:
            gathered = autograd_collectives.whole(tensor, group, dim)
            return gathered.narrow(dim, 0, self.length).contiguous()
        # Rank r has the pieces r and 2n - 1 - r of 2n: the first ones are in order, the second ones in reverse order.
        first, second = tensor.narrow(dim, 0, self.piece), tensor.narrow(dim, self.piece, self.piece)
        both = autograd_collectives.whole(torch.stack((first, second)), group, dim)
        later = both[1].unflatten(dim, (group.size(), self.piece)).flip(dim - 1).flatten(dim - 1, dim)  # type: ignore[no-untyped-call]
        return torch.cat((both[0], later), dim).narrow(dim, 0, self.length).contiguous()

    def _part_of_sum(self, tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        size = group.size()
        parts = [self._of_rank(tensor, dim, rank) for rank in range(size)]
        sent = torch.stack(parts)
        count_all_to_all(sent, group)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.sum(0)

    def _of_rank(self, tensor: Tensor, dim: int, rank: int) -> Tensor:
        numbers = (rank, 2 * self.group.size() - 1 - rank) if self._is_balanced else (rank,)
        return torch.cat([self._piece_of(tensor, dim, number) for number in numbers], dim)

    def heads_for_tokens(self, tensors: list[Tensor]) -> list[Tensor]:
        """Give each rank all tokens of its share of the heads, for tensors of its own tokens of all heads.

        This follows DeepSpeed-Ulysses (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509). Tensors whose last
        dimensions are equal travel in one exchange.

        Args:
            tensors: Tensors of shape ``(..., heads, own tokens, features)``.

        Returns:
            Tensors of shape ``(..., heads / ranks, tokens, features)``.
        """
        if len({(*tensor.shape[:-3], *tensor.shape[-2:]) for tensor in tensors}) > 1:
            return [_HeadsForTokens.apply(self, tensor)[0] for tensor in tensors]  # type: ignore[no-untyped-call]
        return list(_HeadsForTokens.apply(self, *tensors))  # type: ignore[no-untyped-call]

    def tokens_for_heads(self, tensor: Tensor) -> Tensor:
        """Give each rank its own tokens of all heads; this is the inverse of :meth:`heads_for_tokens`.

        Args:
            tensor: A tensor of shape ``(..., heads / ranks, tokens, features)``.

        Returns:
            A tensor of shape ``(..., heads, own tokens, features)``.
        """
        (result,) = _TokensForHeads.apply(self, tensor)  # type: ignore[no-untyped-call]
        return cast(Tensor, result)


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tokens, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tokens = tokens
        size = tokens.group.size()
        # The ranks come first before the tensors are joined, so that they are copied only once before they are sent.
        parts = [tensor.unflatten(-3, (size, tensor.size(-3) // size)).movedim(-4, 0) for tensor in tensors]  # type: ignore[no-untyped-call]
        received = _all_to_all(torch.cat(parts, -3), tokens.group)
        split = received.split([part.size(-3) for part in parts], -3)  # type: ignore[no-untyped-call]
        return tuple(torch.cat(part.unbind(), -2).narrow(-2, 0, tokens.length) for part in split)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_TokensForHeads.apply(ctx.tokens, *gradients)  # type: ignore[no-untyped-call]


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tokens, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tokens = tokens
        size, own = tokens.group.size(), tokens.own
        parts = [_filled(tensor, -2, own * size).unflatten(-2, (size, own)).movedim(-3, 0) for tensor in tensors]  # type: ignore[no-untyped-call]
        received = _all_to_all(torch.cat(parts, -3), tokens.group)
        split = received.split([part.size(-3) for part in parts], -3)  # type: ignore[no-untyped-call]
        return tuple(torch.cat(part.unbind(), -3) for part in split)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_HeadsForTokens.apply(ctx.tokens, *gradients)  # type: ignore[no-untyped-call]


def _filled(tensor: Tensor, dim: int, size: int, fill: float = 0.0) -> Tensor:
    """Return ``tensor`` with values added at the end of the negative dimension ``dim``, up to ``size``."""
    missing = size - tensor.size(dim)
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_full(shape, fill)), dim)


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send entry ``i`` along the first dimension to rank ``i``, and return the received ones along it."""
    sent = tensor.contiguous()
    count_all_to_all(sent, group)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _ScaleGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
