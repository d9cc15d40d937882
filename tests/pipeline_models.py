"""Define tiny models, as a user would write them, with enough layers to be cut into pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import CONTEXT, GPT, MODELS, VOCAB, Block, Residual, TestModule, Transformer
from tests.split_models import SIZES, Images, LanguageModel

__all__ = ["PIPELINE_MODELS"]


class DeepGPT(GPT):
    """Train the GPT of ``tests.models`` with eight blocks: tied, with parameters outside of layers and a frozen one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = Transformer(num_layers=8)
        self.model.blocks[0].norm_1.bias.requires_grad_(False)


class DropoutBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(super().forward(x), 0.2, self.training)


class Dropout(GPT):
    """Apply dropout within its blocks, between them, and after the embedding."""

    calls = ["model.embedding", *(f"model.blocks.{index}" for index in range(4)), "model.norm", "model.head"]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = Transformer(num_layers=4, tied=False)
        self.model.blocks = nn.ModuleList(DropoutBlock(20) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = functional.dropout(self.model.embedding(tokens) + self.model.position, 0.1)
        for block in self.model.blocks:
            x = functional.dropout(block(x), 0.1)
        logits = self.model.head(self.model.norm(x)) * self.temperature
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Llama(LanguageModel):
    def make_model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            **SIZES,
        )  # fmt: skip
        return LlamaForCausalLM(config)


class GPT2(LanguageModel):
    """Tie the embedding to the head."""

    def make_model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=VOCAB, n_positions=CONTEXT, n_embd=24, n_layer=4, n_head=4, use_cache=False, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)


class Bert(LanguageModel):
    """Mask tokens at random in the step, and make an attention mask from the batch."""

    def make_model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=VOCAB, hidden_size=24, num_hidden_layers=4, num_attention_heads=4, intermediate_size=40,
            max_position_embeddings=CONTEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForMaskedLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        masked = torch.rand(tokens.shape, device=tokens.device) < 0.3
        masked[:, 0] = True
        inputs = tokens.masked_fill(masked, 0)
        logits = self.model(input_ids=inputs, attention_mask=(tokens != 1).long()).logits
        return functional.cross_entropy(logits.flatten(0, 1), tokens.masked_fill(~masked, -100).flatten())


class Mixtral(LanguageModel):
    """Train a mixture of experts, whose auxiliary loss needs the router logits of every block."""

    def make_model(self) -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            hidden_size=24, intermediate_size=16, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
            num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm", output_router_logits=True,
            router_aux_loss_coef=0.5, **SIZES,
        )  # fmt: skip
        return MixtralForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        output = self.model(input_ids=tokens, labels=tokens)
        loss = functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        return loss + 0.5 * output.aux_loss.to(loss.device)


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


class ResNet(Images):
    """Use BatchNorm, which normalizes by the statistics of a microbatch."""

    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
                self.stage = nn.Sequential(*(Residual(6) for _ in range(4)))
                self.head = nn.Linear(6, 4)

            def forward(self, images: Tensor) -> Tensor:
                return self.head(self.stage(self.stem(images)).mean((2, 3)))

        return Model()


class Sequential(Images):
    """Stack layers in an ``nn.Sequential``."""

    def make_model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(192, 24)]
        for _ in range(4):
            layers += [nn.ReLU(), nn.Linear(24, 24)]
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(24, 4))


class Encoder(Images):
    """Use torch's own transformer encoder."""

    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patches = nn.Linear(12, 24)
                layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True, norm_first=True)
                self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
                self.head = nn.Linear(24, 4)

            def forward(self, images: Tensor) -> Tensor:
                return self.head(self.encoder(self.patches(images.reshape(-1, 16, 12))).mean(1))

        return Model()


class UNet(Images):
    """Pass the inputs of early blocks to late blocks by skip connections."""

    def make_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patches = nn.Linear(12, 24)
                self.down = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(2))
                self.up = nn.ModuleList(nn.Sequential(nn.Linear(48, 24), nn.GELU()) for _ in range(2))
                self.head = nn.Linear(24, 4)

            def forward(self, images: Tensor) -> Tensor:
                x = self.patches(images.reshape(-1, 16, 12))
                skipped = []
                for block in self.down:
                    skipped.append(x)
                    x = block(x)
                for block in self.up:
                    x = block(torch.cat((x, skipped.pop()), -1))
                return self.head(x.mean(1))

        return Model()


PIPELINE_MODELS: dict[str, type[TestModule]] = {
    "deep_gpt": DeepGPT, "deep_llama": Llama, "deep_gpt2": GPT2, "bert": Bert, "deep_mixtral": Mixtral,
    "deep_t5": T5, "deep_batch_norm": ResNet, "sequential": Sequential, "deep_encoder": Encoder, "unet": UNet,
    "dropout": Dropout,
}  # fmt: skip
MODELS |= PIPELINE_MODELS
