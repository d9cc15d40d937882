"""Define a language model whose blocks use ``nn.MultiheadAttention`` in the ways that torch allows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.attention_models import HEADS, WIDTH, Block
from tests.models import CONTEXT

__all__ = ["blocks"]


def hidden_keys(length: int) -> Tensor:
    return torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)


class Use(nn.Module):
    """Hold attention that is called as a subclass does it."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})


class Hinted(Use):
    def forward(self, x: Tensor) -> Tensor:
        mask = hidden_keys(x.size(1)).to(x.device)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]


class TokensFirst(Use):
    def __init__(self) -> None:
        super().__init__(batch_first=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.size(1), x.size(1), dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(hidden_keys(x.size(1)).to(x.device), float("-inf"))
        swapped = x.transpose(0, 1)
        out, weights = self.attention(swapped, swapped, swapped, attn_mask=mask)
        return out.transpose(0, 1) + weights @ x


class WeightsOfHeads(Use):
    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(
            x, x, x, attn_mask=hidden_keys(x.size(1)).to(x.device), average_attn_weights=False
        )
        return out + weights.square().mean(1) @ x


class OtherWidths(Use):
    def __init__(self) -> None:
        super().__init__(kdim=10, vdim=6)
        self.keys, self.values = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        mask = hidden_keys(x.size(1)).to(x.device)
        return self.attention(x, self.keys(x), self.values(x), attn_mask=mask)[0]


class TwoMasks(Use):
    """Hide a token of some samples, and give each head a mask of its own."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        slopes = torch.arange(1, HEADS + 1).view(HEADS, 1, 1) / HEADS
        self.register_buffer("mask", -slopes * (torch.arange(CONTEXT) - torch.arange(CONTEXT)[:, None]).abs())

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        mask = self.mask[:, :length, :length].masked_fill(hidden_keys(length).to(x.device), float("-inf")).to(x.dtype)
        padding = torch.zeros(x.size(0), length, dtype=torch.bool, device=x.device)
        padding[:, 1] = x[:, 0, 0] > 0
        masks = mask.repeat(x.size(0), 1, 1)
        return self.attention(x, x + 1, x - 1, padding, False, masks)[0]


class OneSample(Use):
    def forward(self, x: Tensor) -> Tensor:
        mask = hidden_keys(x.size(1)).to(x.device)
        return torch.stack([self.attention(sample, sample, sample, attn_mask=mask)[0] for sample in x])


USES = {
    "hinted": Hinted,
    "tokens_first": TokensFirst,
    "weights_of_heads": WeightsOfHeads,
    "other_widths": OtherWidths,
    "two_masks": TwoMasks,
    "one_sample": OneSample,
}
"""Makers of modules that compute attention, by names."""


def blocks() -> dict[str, nn.Module]:
    """Return a block of each use, by its name."""
    return {name: Block(make()) for name, make in USES.items()}
