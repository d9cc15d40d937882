"""Define a small language model that every technique applies to, written as a user would write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.behaviour.models import VOCABULARY, has_variants

__all__ = ["Attention", "Experts", "FeedForward", "Layer", "Mixture", "Writer", "momentum"]

WIDTH, MAX_LENGTH = 16, 32


class Attention(nn.Module):
    """Attend to earlier tokens, with four heads."""

    def __init__(self, width: int = WIDTH, num_heads: int = 4) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head_size = width // num_heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(functional.silu(self.up(x))))


class Experts(nn.Module):
    """Hold the weights of all experts in stacked tensors."""

    def __init__(self, num_experts: int = 4, width: int = WIDTH, hidden: int = 8) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * hidden**-0.5)

    def forward(self, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        chosen = functional.one_hot(indices, self.num_experts).to(weights.dtype) * weights[..., None]
        hidden = torch.einsum("nd,edh->neh", hidden_states, self.up).relu()
        return (torch.einsum("neh,ehd->ned", hidden, self.down) * chosen.sum(1)[..., None]).sum(1)


class Mixture(nn.Module):
    """Add the results of the two experts that a router chooses to those of a layer that all tokens share."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.shared = FeedForward(width, dropout)
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = Experts(4, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, indices = self.router(tokens).softmax(-1).topk(2)
        return self.shared(x) + self.experts(tokens, indices, weights).view_as(x)


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mixture = Mixture(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


def momentum(params: Any) -> torch.optim.Optimizer:
    """Make an optimizer whose errors are proportional to those of the gradients."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Writer(pl.LightningModule):
    """Model language by layers with attention and a mixture of experts.

    Args:
        optimizer: Function that makes the optimizer of the given parameters.
        num_layers: Number of layers.
        tied: Whether the head has the weights of the embedding.
        dropout: Probability with which the feed-forward layers drop a number.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], Any] = momentum,
        num_layers: int = 2,
        tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        has_variants()
        torch.manual_seed(1)
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout=dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self._optimizer = optimizer

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))

    def loss(self, batch: Any) -> Tensor:
        ids = batch[0]
        return functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test/loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())
