"""Define tiny models with padding masks and sliding windows, whose sequences are split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import CONTEXT, MODELS, VOCAB
from tests.split_models import SIZES, LanguageModel, RoundingLanguageModel

__all__ = ["SEQUENCE_MODELS"]


class PaddedBert(LanguageModel):
    """Attend in both directions, but not to the padding at the end of each sample."""

    def make_model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
            max_position_embeddings=CONTEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForMaskedLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        length = tokens.size(1)
        lengths = length // 2 + tokens[:, 0] % (length // 2)
        is_padding = torch.arange(length, device=tokens.device) >= lengths[:, None]
        is_masked = (tokens % 3 == 0) & ~is_padding
        logits = self.model(input_ids=tokens.masked_fill(is_masked, 0), attention_mask=(~is_padding).long()).logits
        # The mean is over all tokens, of which each rank has as many as the others.
        losses = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        return (losses * is_masked.flatten()).mean()


class Gemma(RoundingLanguageModel):
    """Have layers with a sliding window between those with full attention, and a tied head."""

    def make_model(self) -> nn.Module:
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        config = Gemma3TextConfig(
            hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=6, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0,
            **SIZES,
        )  # fmt: skip
        return Gemma3ForCausalLM(config)


SEQUENCE_MODELS = {"padded_bert": PaddedBert, "gemma3": Gemma}
MODELS |= SEQUENCE_MODELS  # type: ignore[arg-type]
