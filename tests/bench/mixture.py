"""Define the examples' GPT with a mixture of experts in each block, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt.model import GPT, Block

__all__ = ["NUM_EXPERTS", "Experts", "Mixture", "with_mixtures"]

NUM_EXPERTS, TOP_K = 8, 2


class Experts(nn.Module):
    """Compute the experts of tokens one expert after another, as transformers does by default.

    Args:
        num_experts: Number of experts.
        dim: Width of a token.
        hidden_dim: Width inside of an expert.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) * hidden_dim**-0.5 / 4)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of the outputs of each token's experts.

        Args:
            tokens: Tokens of shape ``(n, dim)``.
            index: The experts of each token, of shape ``(n, k)``.
            weights: Their weights, of the same shape.
        """
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, place = torch.where(index == expert)
            if len(row):
                output = functional.silu(tokens[row] @ self.up[expert]) @ self.down[expert]
                result = result.index_add(0, row, output * weights[row, place, None])
        return result


class Mixture(nn.Module):
    """Route each token to the two best of its experts.

    Args:
        dim: Width of a token.
        hidden_dim: Width inside of an expert.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, NUM_EXPERTS, bias=False)
        self.experts = Experts(NUM_EXPERTS, dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, length, dim) to the same shape."""
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(TOP_K)
        return self.experts(tokens, index, weights / weights.sum(-1, keepdim=True)).view_as(x)


def with_mixtures(model: GPT) -> Any:
    """Replace the feed-forward layers of ``model`` by mixtures, and return it."""
    for block in model.blocks:
        assert isinstance(block, Block)
        dim = block.feed_forward.down.out_features
        block.feed_forward = Mixture(dim, 2 * dim)  # type: ignore[assignment]
    return model
