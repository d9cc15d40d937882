"""Test causal attention with gathered keys, for the tokens of each rank in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias

from lightning_dist.techniques.context_parallel import attention
from lightning_dist.techniques.context_parallel.attention import SplitAttention
from lightning_dist.techniques.context_parallel.tokens import Tokens


class TokensOfRank(Tokens):
    """Have the tokens of a rank whose other ranks are not there: a gathered tensor is given in place of its part."""

    def __init__(self, length: int, rank: int, size: int, is_balanced: bool) -> None:
        group: Any = SimpleNamespace(size=lambda: size, rank=lambda: rank)
        super().__init__(length, group, is_balanced)
        self.gathered: list[Tensor] = []

    def gather_to(self, tensor: Tensor, dim: int) -> Tensor:
        return self.gathered.pop(0)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("is_balanced", [False, True])
@pytest.mark.parametrize(("length", "size"), [(1, 2), (5, 4), (8, 2), (8, 4), (13, 3), (16, 4)])
def test_the_parts_of_all_ranks_are_the_attention_of_the_whole_sequence(
    length: int, size: int, is_balanced: bool, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[Any] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
        masks.append(attn_mask)
        assert key.size(-2) <= length
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)

    monkeypatch.setattr(attention, "_attend", attend)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, 6, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (4, num_kv_heads, num_kv_heads)
    )
    weights = torch.randn(2, 4, length, 6, dtype=torch.float64, generator=generator)
    options: dict[str, Any] = {"is_causal": True, "scale": 0.3, "enable_gqa": num_kv_heads < 4}

    expected = functional.scaled_dot_product_attention(query, key, value, **options)
    expected_grads = torch.autograd.grad((expected * weights).sum(), [query, key, value])
    loss = torch.zeros((), dtype=torch.float64)
    for rank in range(size):
        tokens = TokensOfRank(length, rank, size, is_balanced)
        tokens.gathered = [key, value]
        own = tokens.part(query, -2)
        own_keys = tokens.part(key, -2)
        out = SplitAttention(tokens, "all_gather")(own, own_keys, own_keys, **options)
        assert out.shape == own.shape
        wanted = tokens.part(expected, -2)
        is_real = tokens.part(torch.ones(length, 1), -2).bool().squeeze(-1)
        torch.testing.assert_close(out[..., is_real, :], wanted[..., is_real, :], rtol=1e-10, atol=1e-12)
        # Every rank's result depends on the keys, because their gradients are reduced over all ranks.
        assert out.requires_grad and torch.autograd.grad(out.sum(), key, retain_graph=True)[0] is not None
        loss = loss + (out * tokens.part(weights, -2)).sum()
    grads = torch.autograd.grad(loss, [query, key, value])
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-12)
    assert all(mask is None or isinstance(mask, CausalBias) for mask in masks)  # None is a tensor of all pairs.


def test_the_bias_of_a_long_sequence_takes_no_memory() -> None:
    bias = attention._lower_right(2**17, 2**20)
    assert isinstance(bias, CausalBias)
    assert (bias.seq_len_q, bias.seq_len_kv) == (2**17, 2**20)
    assert bias.untyped_storage().nbytes() == 0  # torch's own would take a terabyte.
