"""Define families of models of images, speech, and images with text."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.family import BATCH_SIZE, LENGTH, VOCAB, Batch, Family, config_of, images, labels, text
from tests.zoo.text import GROUPED, SIZES, TOKENS

__all__ = ["MULTIMODAL", "SPEECH", "VISION"]

IMAGE_SIZE, PATCH_SIZE, NUM_LABELS = 16, 4, 5
ENCODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE,
}  # fmt: skip


def _vision(name: str, prefix: str, head: str = "ForImageClassification", **values: Any) -> Family:
    config = config_of(f"{prefix}Config", num_labels=NUM_LABELS, **values)
    return Family(name, "vision", f"{prefix}{head}", config, images(IMAGE_SIZE, labels=labels(NUM_LABELS)))


def _convolutions(name: str, prefix: str, **values: Any) -> Family:
    config = config_of(f"{prefix}Config", num_labels=NUM_LABELS, **values)
    return Family(name, "vision", f"{prefix}ForImageClassification", config, images(32, labels=labels(NUM_LABELS)))


VISION = [
    _vision("ViT", "ViT", **ENCODER),
    _vision("DeiT", "DeiT", **ENCODER),
    _vision("BEiT", "Beit", **ENCODER, use_relative_position_bias=True, use_mask_token=False),
    _vision("DINOv2", "Dinov2", **ENCODER),
    _vision("ViT-MSN", "ViTMSN", **ENCODER),
    _convolutions("Swin", "Swin", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                  window_size=4),
    _convolutions("ConvNeXt", "ConvNext", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
    _convolutions("ResNet", "ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic"),
    Family(
        "SegFormer", "vision", "SegformerForSemanticSegmentation",
        config_of(
            "SegformerConfig", num_labels=NUM_LABELS, num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1],
            hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
            decoder_hidden_size=16,
        ),
        images(32, labels=labels(NUM_LABELS, 32, 32)),
    ),
]  # fmt: skip


def _waves(generator: torch.Generator) -> Batch:
    waves = torch.randn(BATCH_SIZE, 400, generator=generator)
    return {"input_values": waves, "labels": torch.randint(4, 32, (BATCH_SIZE, 3), generator=generator)}


def _spectrogram(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH_SIZE, 8, 32, generator=generator)
    return {"input_features": features, "labels": text(generator)["labels"]}


WAVES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "pad_token_id": 0, "ctc_loss_reduction": "mean",
}  # fmt: skip

SPEECH = [
    Family("wav2vec2", "speech", "Wav2Vec2ForCTC", config_of("Wav2Vec2Config", **WAVES), _waves),
    Family("HuBERT", "speech", "HubertForCTC", config_of("HubertConfig", **WAVES), _waves),
    Family("WavLM", "speech", "WavLMForCTC", config_of("WavLMConfig", **WAVES, num_buckets=8), _waves),
    Family(
        "Whisper", "speech", "WhisperForConditionalGeneration",
        config_of(
            "WhisperConfig", **TOKENS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16,
            max_target_positions=LENGTH, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
            use_cache=False,
        ),
        _spectrogram,
    ),
]  # fmt: skip


def _image_and_text(generator: torch.Generator) -> Batch:
    return {"pixel_values": images(IMAGE_SIZE)(generator)["pixel_values"], **_paired_text(generator)}


def _paired_text(generator: torch.Generator) -> Batch:
    return {"input_ids": text(generator)["input_ids"], "attention_mask": torch.ones(BATCH_SIZE, LENGTH).long()}


def _captioned(generator: torch.Generator) -> Batch:
    batch = _image_and_text(generator)
    return {**batch, "labels": batch["input_ids"]}


def _with_image_tokens(generator: torch.Generator, token: int, number: int) -> Batch:
    """Make text in which ``number`` tokens after the first stand for the image."""
    tokens = torch.randint(4, token, (BATCH_SIZE, number + LENGTH), generator=generator)
    tokens[:, 1 : 1 + number] = token
    wanted = tokens.masked_fill(tokens == token, -100)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": wanted}


IMAGE_TOKEN = VOCAB - 1


def _llava(generator: torch.Generator) -> Batch:
    return {
        **_with_image_tokens(generator, IMAGE_TOKEN, (IMAGE_SIZE // PATCH_SIZE) ** 2),
        "pixel_values": images(IMAGE_SIZE)(generator)["pixel_values"],
    }


def _idefics(generator: torch.Generator) -> Batch:
    return {
        **_with_image_tokens(generator, IMAGE_TOKEN, (IMAGE_SIZE // PATCH_SIZE) ** 2 // 4),
        "pixel_values": images(IMAGE_SIZE)(generator)["pixel_values"].unsqueeze(1),
    }


def _qwen2_vl(generator: torch.Generator) -> Batch:
    """Make images as patches; the patches of all samples are concatenated along dimension 0."""
    rows = 4 * 4
    return {
        **_with_image_tokens(generator, IMAGE_TOKEN, rows // 4),
        "pixel_values": torch.randn(BATCH_SIZE * rows, 3 * 2 * PATCH_SIZE**2, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH_SIZE),
        "mm_token_type_ids": torch.zeros(BATCH_SIZE, LENGTH + rows // 4).long(),
    }


TEXT: dict[str, Any] = {**SIZES, "projection_dim": 32}
LONG: dict[str, Any] = {**GROUPED, "max_position_embeddings": 64, "use_cache": False}

MULTIMODAL = [
    Family(
        "CLIP", "multimodal", "CLIPModel",
        config_of("CLIPConfig", text_config=TEXT, vision_config=ENCODER, projection_dim=16),
        _image_and_text, options={"return_loss": True},
    ),
    Family(
        "SigLIP", "multimodal", "SiglipModel", config_of("SiglipConfig", text_config=SIZES, vision_config=ENCODER),
        _image_and_text, options={"return_loss": True},
    ),
    Family(
        "BLIP", "multimodal", "BlipForConditionalGeneration",
        config_of("BlipConfig", text_config={**SIZES, "encoder_hidden_size": 32}, vision_config=ENCODER), _captioned,
    ),
    Family(
        "LLaVA", "multimodal", "LlavaForConditionalGeneration",
        config_of(
            "LlavaConfig", image_token_index=IMAGE_TOKEN, vision_feature_layer=-1,
            text_config=config_of("LlamaConfig", **LONG), vision_config=config_of("CLIPVisionConfig", **ENCODER),
        ),
        _llava,
    ),
    Family(
        "Qwen2-VL", "multimodal", "Qwen2VLForConditionalGeneration",
        config_of(
            "Qwen2VLConfig", image_token_id=IMAGE_TOKEN, vision_start_token_id=1, vision_end_token_id=2,
            video_token_id=3,
            text_config={**LONG, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2,
                           "patch_size": PATCH_SIZE, "spatial_merge_size": 2, "temporal_patch_size": 2},
        ),
        _qwen2_vl, packed={"pixel_values": 16},
    ),
    Family(
        "Idefics3", "multimodal", "Idefics3ForConditionalGeneration",
        config_of(
            "Idefics3Config", image_token_id=IMAGE_TOKEN, scale_factor=2, text_config=config_of("LlamaConfig", **LONG),
            vision_config=ENCODER,
        ),
        _idefics,
    ),
]  # fmt: skip
