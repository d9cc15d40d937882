"""Test layers that tensor parallelism splits by an inferred plan, in models without a plan of their own."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.case import Run, case
from tests.behaviour.models import LENGTH, VOCABULARY, sgd, tokens

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Compute attention with a bias of the queries, and with a position bias for each head, which is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_size = HEADS, WIDTH // HEADS
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.query_bias = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_size)
        h = self.norm(x)
        query = (self.query(h) + self.query_bias).view(shape).transpose(1, 2)
        key, value = (layer(h).view(shape).transpose(1, 2) for layer in (self.key, self.value))
        scores = (query @ key.transpose(-1, -2) / self.head_size**0.5 + bias).masked_fill(~mask, -1e9)
        return x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        x = self.attention(x, mask, bias)
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    """Hold the output layer's bias as a second attribute, as BERT does, without using it."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = embedding.weight
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


@functools.lru_cache
def relative_positions(length: int) -> Tensor:
    return torch.arange(length)[None] - torch.arange(length)[:, None] + length - 1


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(2 * LENGTH - 1, HEADS)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = Head(self.embedding)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        bias = self.positions(relative_positions(tokens.size(1))).permute(2, 0, 1)[None]
        for layer in self.layers:
            x = layer(x, mask[:, None, None], bias)
        return self.head(x)


class Masked(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Encoder()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens, tokens != 0)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


@case("attention with a padding mask, a query bias, and a position bias for each head")
def masked_attention(run: Run) -> None:
    run.fit(Masked(), run.loader(tokens()))


class Remembering(Layer):
    """Keep a tensor of the last forward, which is not a leaf of the graph and so cannot be deep-copied."""

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        self.last = x * 2
        return super().forward(x, mask, bias)


@case("blocks that keep a tensor of their last forward")
def kept_tensor(run: Run) -> None:
    model = Masked()
    torch.manual_seed(1)
    model.model.layers = nn.ModuleList(Remembering() for _ in range(4))
    run.fit(model, run.loader(tokens()))
