"""Define tiny models of many kinds, as a user would write them, which tensor parallelism splits without a plan."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt import model as example
from tests import attention_models, multihead_models
from tests.models import CONTEXT, GPT, MODELS, VOCAB, TestModule
from tests.zoo.float64 import float64_throughout

__all__ = ["SIZES", "SPLIT_MODELS", "LanguageModel", "RoundingLanguageModel"]

SIZES: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "use_cache": False}


class LanguageModel(TestModule):
    """Train a language model on the next token."""

    data = GPT.data

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = self.make_model()

    def make_model(self) -> nn.Module:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        # The loss that the model itself computes would round the logits to float32.
        return functional.cross_entropy(self.model(**self.inputs(tokens)).logits.flatten(0, 1), targets.flatten())

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"input_ids": tokens}


class RoundingLanguageModel(LanguageModel):
    """Train a model whose norms or routers would round to float32, which turns an error of 1e-16 into one of 1e-8."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        in_float64 = next(self.parameters()).dtype is torch.float64
        with float64_throughout() if in_float64 else nullcontext():
            return super().training_step(batch, batch_idx)


class Llama(LanguageModel):
    def make_model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            **SIZES,
        )  # fmt: skip
        return LlamaForCausalLM(config)


class Qwen(LanguageModel):
    """Tie the embedding to the head, and have a norm of each head between layers that are split."""

    def make_model(self) -> nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            head_dim=6, tie_word_embeddings=True, **SIZES,
        )  # fmt: skip
        return Qwen3ForCausalLM(config)


class GPT2(LanguageModel):
    """Use Conv1D layers, compute query, key and value in one layer, and tie the embedding to the head."""

    def make_model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=VOCAB, n_positions=CONTEXT, n_embd=24, n_layer=2, n_head=4, use_cache=False,
            bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)


class Mixtral(RoundingLanguageModel):
    def make_model(self) -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            hidden_size=24, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager", **SIZES,
        )  # fmt: skip
        return MixtralForCausalLM(config)


class Bart(LanguageModel):
    """Train an encoder and a decoder."""

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}

    def make_model(self) -> nn.Module:
        from transformers import BartConfig, BartForConditionalGeneration

        config = BartConfig(
            vocab_size=VOCAB, max_position_embeddings=2 * CONTEXT, d_model=24, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40,
            dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, use_cache=False, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
        )  # fmt: skip
        return BartForConditionalGeneration(config)


class T5(LanguageModel):
    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}

    def make_model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=VOCAB, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
            decoder_start_token_id=0, pad_token_id=0, relative_attention_num_buckets=8,
        )  # fmt: skip
        return T5ForConditionalGeneration(config)


class Images(TestModule):
    """Classify images of 8 x 8 pixels."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = self.make_model()

    def make_model(self) -> nn.Module:
        raise NotImplementedError

    def data(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(self.num_samples, 3, 8, 8, generator=generator)
        return images, (images.mean((1, 2, 3)) > 0).long() + 2 * (images[:, 0].mean((1, 2)) > 0).long()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.model(images), labels)


class ViT(Images):
    def make_model(self) -> nn.Module:
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, image_size=8,
            patch_size=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip

        class Classifier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encoder, self.head = ViTModel(config, add_pooling_layer=False), nn.Linear(24, 4)

            def forward(self, images: Tensor) -> Tensor:
                return self.head(self.encoder(pixel_values=images).last_hidden_state[:, 0])

        return Classifier()


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 20), nn.GELU(), nn.Linear(20, tokens))
        self.over_channels = nn.Sequential(nn.Linear(dim, 40), nn.GELU(), nn.Linear(40, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm_2(x))


class Mixer(Images):
    """Mix tokens by linear layers instead of attention."""

    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patches = nn.Conv2d(3, 24, 2, stride=2)
                self.blocks = nn.Sequential(*(MixerBlock(16, 24) for _ in range(2)))
                self.head = nn.Linear(24, 4)

            def forward(self, images: Tensor) -> Tensor:
                return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1))

        return Model()


class Encoder(Images):
    """Use torch's own transformer encoder."""

    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patches = nn.Linear(12, 24)
                layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True, norm_first=True)
                self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
                self.head = nn.Linear(24, 4)

            def forward(self, images: Tensor) -> Tensor:
                return self.head(self.encoder(self.patches(images.reshape(-1, 16, 12))).mean(1))

        return Model()


class Example(LanguageModel):
    """Train the GPT of the examples."""

    def make_model(self) -> nn.Module:
        return example.GPT(dim=24, num_layers=2, num_heads=4, hidden_dim=40, max_len=CONTEXT)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Attentions(GPT):
    """Write attention in ten ways."""

    def __init__(self, **kwargs: Any) -> None:
        TestModule.__init__(self, **kwargs)
        self.model, self.temperature = attention_models.Model(), 1.0


class MultiheadAttentions(GPT):
    """Use ``nn.MultiheadAttention`` in several ways."""

    def __init__(self, **kwargs: Any) -> None:
        TestModule.__init__(self, **kwargs)
        self.model, self.temperature = attention_models.Model(multihead_models.blocks()), 1.0


class Convolutions(Images):
    """Use convolutions, norms and linear layers, none of which is in a pair with a residual sum."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1, padding_mode="circular"), nn.GroupNorm(2, 24), nn.GELU(),
            nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.ConvTranspose2d(24, 16, 2, stride=2), nn.ReLU(),
            nn.Flatten(2), nn.Conv1d(16, 8, 4, stride=4), nn.Flatten(), nn.Linear(128, 48), nn.Tanh(), nn.Linear(48, 4),
        )  # fmt: skip


SPLIT_MODELS = {
    "example_gpt": Example, "llama3": Llama, "qwen": Qwen, "gpt2": GPT2, "mixtral": Mixtral, "bart": Bart, "t5": T5,
    "vit": ViT, "mixer": Mixer, "encoder": Encoder, "attentions": Attentions,
    "multihead": MultiheadAttentions, "convolutions": Convolutions,
}  # fmt: skip
MODELS |= SPLIT_MODELS  # type: ignore[arg-type]
