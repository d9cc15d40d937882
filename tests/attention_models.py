"""Define a language model whose blocks write attention in ten ways, as it is found in users' code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models import CONTEXT, VOCAB

__all__ = ["HEADS", "WAYS", "WIDTH", "Block", "Config", "FromConfig", "Model", "Recomputed"]

WIDTH, HEADS = 24, 4


@dataclass(frozen=True)
class Config:
    n_embd: int = WIDTH
    n_head: int = HEADS


class Separate(nn.Module):
    """Have a layer each for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Packed(nn.Module):
    """Have one layer for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)


def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class SplitByWidth(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.register_buffer("bias", torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = functional.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class ThreeLayers(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        k, q, v = (
            layer(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for layer in (self.key, self.query, self.value)
        )
        return self.proj(mixed(q, k, v).transpose(1, 2).contiguous().view(b, t, c))


class HeadsAndSize(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.d = HEADS, WIDTH // HEADS

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q = self.query(x).view(b, t, self.heads, self.d).transpose(1, 2)
        k = self.key(x).view(b, t, self.heads, self.d).transpose(1, 2)
        v = self.value(x).view(b, t, self.heads, self.d).transpose(1, 2)
        return self.proj(mixed(q, k, v).transpose(1, 2).contiguous().view(b, t, c))


class Einsum(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, self.num_heads, width // self.num_heads
        q, k, v = self.query(x).reshape(shape), self.key(x).reshape(shape), self.value(x).reshape(shape)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / (width // self.num_heads) ** 0.5
        scores = scores + torch.full((length, length), float("-inf")).triu(1).to(scores)
        return self.proj(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(batch, length, width))


class ReshapeOfThree(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.c_attn(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.c_proj(mixed(q, k, v).transpose(1, 2).reshape(b, n, c))


class Chunks(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, x.size(-1) // self.heads)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        return self.c_proj(mixed(q, k, v).transpose(1, 2).flatten(2))


class HeadsFromWidth(Separate):
    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size(0), x.size(1), x.size(2)
        q, k, v = (layer(x).view(b, t, c // 6, 6).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.proj(mixed(q, k, v).transpose(1, 2).reshape(b, t, c))


class BatchOfHeads(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.nhead = HEADS

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        d = c // self.nhead

        def fold(tensor: Tensor) -> Tensor:
            return tensor.view(b, t, self.nhead, d).transpose(1, 2).reshape(b * self.nhead, t, d)

        q, k, v = fold(self.query(x)), fold(self.key(x)), fold(self.value(x))
        scores = torch.bmm(q, k.transpose(1, 2)) / d**0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1).to(scores.device), float("-inf"))
        y = torch.bmm(scores.softmax(-1), v).view(b, self.nhead, t, d).transpose(1, 2).reshape(b, t, c)
        return self.proj(y)


class FromConfig(Packed):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(self.config.n_embd, dim=2)
        q, k, v = (part.view(b, t, self.config.n_head, c // self.config.n_head).transpose(1, 2) for part in (q, k, v))
        return self.c_proj(mixed(q, k, v).transpose(1, 2).contiguous().view(b, t, c))


class Inside(Separate):
    """Compute attention in the forward of the block itself, from the output of its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.norm = HEADS, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        b, t, c = h.shape
        q, k, v = (
            layer(h).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return x + self.proj(mixed(q, k, v).transpose(1, 2).contiguous().view(b, t, c))


class Recomputed(ThreeLayers):
    """Compute attention again in the backward, outside of the module's forward, in training only.

    Only a factor depends on the width that is read.
    """

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (layer(x).view(b, t, self.n_head, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scale = (c // self.n_head) ** -0.5
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.training else self.attend(x)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


CONFIG = Config()
WAYS = {
    "split_by_width": SplitByWidth,
    "three_layers": ThreeLayers,
    "heads_and_size": HeadsAndSize,
    "einsum": Einsum,
    "reshape_of_three": ReshapeOfThree,
    "chunks": Chunks,
    "heads_from_width": HeadsFromWidth,
    "batch_of_heads": BatchOfHeads,
    "from_config": lambda: FromConfig(CONFIG),
    "inside": Inside,
}
"""Makers of modules that compute attention, by names."""


class Model(nn.Module):
    """Map token ids (batch, length) to logits (batch, length, vocabulary) by blocks; None: one for each way."""

    def __init__(self, blocks: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        of_ways = {name: make() if name == "inside" else Block(make()) for name, make in WAYS.items()}
        self.blocks = nn.ModuleDict(blocks or of_ways)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)
