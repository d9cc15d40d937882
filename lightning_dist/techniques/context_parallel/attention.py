"""Compute attention of a sequence that is split over ranks, by calling torch's function with other tensors.

``F.scaled_dot_product_attention`` is the only point of a block at which tokens see each other. While a block runs on a
part of the sequence, a call of it is replaced by one of these:

- ``ulysses``: the ranks exchange heads for tokens, so that each rank has all tokens of some heads. The original
  function is called for them, with the original mask, causality and dropout, and the results are exchanged back.
- ``all_gather``: each rank gathers all keys and values, and attends to them from its own tokens. Causal attention
  leaves out the keys after these tokens.

Queries of this rank's tokens with keys that each rank has whole, as in cross-attention to an encoder, need no exchange.
Which of them are split is seen from their numbers of tokens. These may be equal by chance, so a step splits no more
than the trial of the block did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from lightning_dist.techniques.context_parallel.plan import AttentionKind, SequenceSplitError
from lightning_dist.techniques.context_parallel.tokens import Tokens

__all__ = ["SplitAttention", "is_attention"]

_attend = functional.scaled_dot_product_attention


def is_attention(function: Any) -> bool:
    """Return whether a torch function computes attention by a call that can be split."""
    return function is _attend or function is functional.multi_head_attention_forward


class SplitAttention:
    """Compute attention for this rank's tokens in place of ``F.scaled_dot_product_attention``.

    Args:
        tokens: The tokens that this rank has.
        attention: ``"ulysses"`` or ``"all_gather"``.
        expected: The kinds of the attentions of the block in their order, as its trial has found them; None: this is
            the trial.
    """

    def __init__(self, tokens: Tokens, attention: str, expected: Sequence[AttentionKind] | None = None) -> None:
        self._tokens = tokens
        self._exchanges_heads = attention == "ulysses"
        self._expected = expected
        self.kinds: list[AttentionKind] = []
        """The kinds of the attentions that have been computed so far."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Take the arguments of ``F.scaled_dot_product_attention``, and return this rank's tokens of its result."""
        tokens = self._tokens
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        kind = self._kind(query.size(-2), key.size(-2))
        self.kinds.append(kind)
        if kind == AttentionKind.NONE:
            return _attend(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa, **options)
        if kind == AttentionKind.QUERIES:
            if is_causal:
                raise SequenceSplitError(
                    f"cp_size={tokens.group.size()}: causal attention from the {tokens.length} split tokens to"
                    f" {key.size(-2)} others cannot be computed on parts of the sequence."
                )
            if attn_mask is not None and attn_mask.ndim > 1 and attn_mask.size(-2) == tokens.length:
                attn_mask = tokens.part(attn_mask, -2, 1)
            return _attend(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
        if attn_mask is not None and is_causal:  # Torch refuses this in its own words.
            return _attend(query, key, value, attn_mask, is_causal=True, **options)
        if attn_mask is not None:
            attn_mask = self._whole_mask(attn_mask)
        if self._exchanges_heads:
            return self._ulysses(query, key, value, attn_mask, is_causal, enable_gqa, options)
        return self._all_gather(query, key, value, attn_mask, is_causal, enable_gqa, options)

    def _kind(self, num_queries: int, num_keys: int) -> AttentionKind:
        """Return the kind of the next attention, which has inputs of these numbers of tokens."""
        if num_queries != self._tokens.own:
            return AttentionKind.NONE
        kind = AttentionKind.ALL if num_keys == self._tokens.own else AttentionKind.QUERIES
        number = len(self.kinds)
        return min(kind, self._expected[number]) if self._expected and number < len(self._expected) else kind

    def _whole_mask(self, mask: Tensor) -> Tensor:
        """Gather a mask that the block has computed from this rank's tokens."""
        tokens = self._tokens
        for dim in (-2, -1):
            if mask.ndim >= -dim and mask.size(dim) not in (1, tokens.length) and mask.size(dim) == tokens.own:
                mask = tokens.gather_to(mask, dim)
        return mask

    def _ulysses(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
        options: dict[str, Any],
    ) -> Tensor:
        tokens, size = self._tokens, self._tokens.group.size()
        num_heads = query.size(-3) if query.ndim > 2 else 1
        if num_heads % size:
            raise SequenceSplitError(
                f"attention='ulysses' with cp_size={size}: the {num_heads} heads of an attention do not divide by it."
                " Use attention='all_gather'."
            )
        if enable_gqa and key.size(-3) % size:  # There are fewer key heads than ranks, so that some ranks share one.
            key, value = (each.repeat_interleave(num_heads // each.size(-3), -3) for each in (key, value))
            enable_gqa = False
        query, key, value = tokens.heads_for_tokens([query, key, value])
        if mask is not None and mask.ndim > 2 and mask.size(-3) == num_heads > 1:
            own = num_heads // size
            mask = mask.narrow(-3, tokens.group.rank() * own, own)
        out = _attend(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa, **options)
        return tokens.tokens_for_heads(out)

    def _all_gather(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
        options: dict[str, Any],
    ) -> Tensor:
        tokens = self._tokens
        key, value = tokens.gather_to(key, -2), tokens.gather_to(value, -2)
        options["enable_gqa"] = enable_gqa
        if mask is not None and mask.ndim > 1 and mask.size(-2) == tokens.length:
            mask = tokens.part(mask, -2, 1)  # An added query may attend to anything: its result is dropped.
        if not is_causal:
            return _attend(query, key, value, mask, **options)
        pieces = []
        for index, number in enumerate(tokens.pieces):
            own = query.narrow(-2, index * tokens.piece, tokens.piece)
            num_keys = min((number + 1) * tokens.piece, tokens.length)
            num_own = num_keys - number * tokens.piece
            if num_own <= 0:  # All tokens are added ones. Their results are dropped, but the ranks reduce gradients.
                pieces.append(_attend(own, key[..., :1, :], value[..., :1, :], **options))
                continue
            out = _attend_causally(own[..., :num_own, :], key[..., :num_keys, :], value[..., :num_keys, :], options)
            pieces.append(functional.pad(out, (0, 0, 0, tokens.piece - num_own)))
        return torch.cat(pieces, -2)


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """Attend from the last of the keys' tokens to the keys up to each, with a kernel for causal attention if possible.

    A mask as a tensor would exclude FlashAttention and take memory for each pair of a query and a key.
    """
    num_queries, num_keys = query.size(-2), key.size(-2)
    if num_queries == num_keys:
        return _attend(query, key, value, is_causal=True, **options)
    return _attend(query, key, value, _lower_right(num_queries, num_keys), **options)


def _lower_right(num_queries: int, num_keys: int) -> Tensor:
    """Return what ``torch.nn.attention.bias.causal_lower_right`` returns, without memory.

    torch's own tensor has two elements for each pair of a query and a key, which nobody reads (torch 2.13). For a
    million tokens on eight ranks, these are a terabyte of the host's memory.
    """
    bias = torch.empty(0).as_subclass(CausalBias)
    bias.__init__(CausalVariant.LOWER_RIGHT, num_queries, num_keys)  # type: ignore[misc]
    return bias
