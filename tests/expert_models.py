"""Define tiny mixtures of experts, as a user would write them, whose experts are distributed over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import GPT, MODELS, VOCAB, TestModule
from tests.split_models import SIZES, RoundingLanguageModel

__all__ = ["EXPERT_MODELS", "PlainExperts", "PlainMixture"]

COMMON: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "experts_implementation": "eager", **SIZES,
}  # fmt: skip


class QwenMoE(RoundingLanguageModel):
    def make_model(self) -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            intermediate_size=40, moe_intermediate_size=16, num_key_value_heads=2, head_dim=6, num_experts=8,
            num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, **COMMON,
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config)


class DeepSeek(RoundingLanguageModel):
    """Have a first layer without experts, shared experts, and a router with groups of experts."""

    def make_model(self) -> nn.Module:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        config = DeepseekV3Config(
            intermediate_size=40, moe_intermediate_size=16, num_key_value_heads=4, n_routed_experts=8,
            n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=8, q_lora_rank=12,
            qk_rope_head_dim=4, v_head_dim=6, qk_nope_head_dim=6, first_k_dense_replace=1,
            **{**COMMON, "num_hidden_layers": 3},
        )  # fmt: skip
        return DeepseekV3ForCausalLM(config)


class GptOss(RoundingLanguageModel):
    """Have experts with biases."""

    def make_model(self) -> nn.Module:
        from transformers import GptOssConfig, GptOssForCausalLM

        config = GptOssConfig(
            intermediate_size=16, num_key_value_heads=2, head_dim=6, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=4, pad_token_id=0, attn_implementation="eager", **COMMON,
        )  # fmt: skip
        return GptOssForCausalLM(config)


class Llama4(RoundingLanguageModel):
    """Have experts that compute on all tokens, which are grouped by expert."""

    def make_model(self) -> nn.Module:
        from transformers import Llama4ForCausalLM, Llama4TextConfig

        config = Llama4TextConfig(
            intermediate_size=16, intermediate_size_mlp=40, num_key_value_heads=2, head_dim=6, num_local_experts=4,
            num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8, pad_token_id=0, **COMMON,
        )  # fmt: skip
        return Llama4ForCausalLM(config)


class PlainExperts(nn.Module):
    """Hold the weights of all experts in three tensors, and compute with all of them at once."""

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden**-0.5)
        self.bias = nn.Parameter(torch.randn(num_experts, dim) * 0.1)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen = functional.one_hot(index, self.num_experts).to(x.dtype) * weights[..., None]
        hidden = torch.einsum("nd,edh->neh", x, self.up).relu()
        results = torch.einsum("neh,ehd->ned", hidden, self.down) + self.bias
        return (results * chosen.sum(1)[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self, dim: int, num_experts: int, router: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, num_experts) if router is None else router
        self.experts = PlainExperts(num_experts, dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, index, weights).view_as(x)


class PlainMixture(TestModule):
    """Use no library of models, and tie the routers of all layers."""

    data = GPT.data

    def __init__(self, num_experts: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding, router = nn.Embedding(VOCAB, 24), nn.Linear(24, num_experts)
        self.blocks = nn.ModuleList(Mixture(24, num_experts, router) for _ in range(2))
        self.head = nn.Linear(24, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


EXPERT_MODELS = {
    "qwen_moe": QwenMoE, "deepseek": DeepSeek, "gpt_oss": GptOss, "llama4": Llama4, "plain_moe": PlainMixture,
}  # fmt: skip
MODELS |= EXPERT_MODELS  # type: ignore[arg-type]
