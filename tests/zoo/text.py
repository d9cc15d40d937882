"""Define families of language models."""

from __future__ import annotations

from typing import Any

from tests.zoo.family import LENGTH, VOCAB, Family, config_of, masked, seq2seq, text

__all__ = ["CAUSAL", "ENCODERS", "EXPERTS", "SEQ2SEQ", "STATE_SPACE"]

TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}


def _causal(
    name: str, prefix: str, kind: str = "causal", head: str = "ForCausalLM", config: str = "Config", **values: Any
) -> Family:
    make_config = config_of(f"{prefix}{config}", use_cache=False, **values)
    return Family(name, kind, f"{prefix}{head}", make_config, text)


def _experts(name: str, prefix: str, **values: Any) -> Family:
    """Return a family of mixtures of experts, without the default ``grouped_mm``, which does not support float64."""
    return _causal(name, prefix, "experts", **values, num_experts_per_tok=2, experts_implementation="batched_mm")


def _masked(name: str, prefix: str, **values: Any) -> Family:
    config = config_of(f"{prefix}Config", **values)
    return Family(name, "masked", f"{prefix}ForMaskedLM", config, masked)


def _seq2seq(name: str, prefix: str, head: str = "ForConditionalGeneration", **values: Any) -> Family:
    config = config_of(f"{prefix}Config", use_cache=False, decoder_start_token_id=0, **values)
    return Family(name, "encoder-decoder", f"{prefix}{head}", config, seq2seq)


CAUSAL = [
    _causal("Llama", "Llama", **GROUPED),
    _causal("Mistral", "Mistral", sliding_window=4, **GROUPED),
    _causal("Qwen2", "Qwen2", **GROUPED),
    _causal("Qwen3", "Qwen3", head_dim=8, tie_word_embeddings=True, **GROUPED),
    _causal("Gemma", "Gemma", head_dim=8, **GROUPED),
    _causal("Gemma2", "Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8, **GROUPED),
    _causal(
        "Gemma3", "Gemma3", config="TextConfig", **GROUPED, head_dim=8, sliding_window=4, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    _causal("Phi", "Phi", **SIZES),
    _causal("Phi3", "Phi3", **GROUPED),
    _causal("GPT-2", "GPT2", head="LMHeadModel", **TOKENS, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4),
    _causal(
        "GPT-Neo", "GPTNeo", **TOKENS, hidden_size=32, num_layers=4, num_heads=4, intermediate_size=48,
        max_position_embeddings=LENGTH, attention_types=[[["global", "local"], 2]], window_size=4,
    ),
    _causal("GPT-NeoX", "GPTNeoX", **SIZES),
    _causal("GPT-J", "GPTJ", **TOKENS, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4, rotary_dim=4),
    _causal("OPT", "OPT", **{**SIZES, "pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=32),
    _causal("BLOOM", "Bloom", **TOKENS, hidden_size=32, n_layer=4, n_head=4),
    _causal("Falcon", "Falcon", **SIZES, multi_query=False, new_decoder_architecture=False, alibi=False),
    _causal("Falcon (new decoder)", "Falcon", **SIZES, num_kv_heads=2, new_decoder_architecture=True, alibi=False),
    _causal("MPT", "Mpt", **TOKENS, d_model=32, n_heads=4, n_layers=4, max_seq_len=LENGTH, expansion_ratio=2),
    _causal("StableLM", "StableLm", **GROUPED),
    _causal("Cohere", "Cohere", **GROUPED),
    _causal("Cohere2", "Cohere2", **GROUPED, sliding_window=4),
    _causal("OLMo", "Olmo", **GROUPED),
    _causal("OLMo2", "Olmo2", **GROUPED),
    _causal("Granite", "Granite", **GROUPED),
    _causal("StarCoder2", "Starcoder2", **GROUPED),
    _causal("SmolLM3", "SmolLM3", **GROUPED),
    _causal("GPT-BigCode", "GPTBigCode", **TOKENS, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4, n_inner=48),
    _causal("CodeGen", "CodeGen", **TOKENS, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4, rotary_dim=4),
    _causal("GLM", "Glm", **GROUPED, head_dim=8),
    _causal("Nemotron", "Nemotron", **GROUPED),
    _causal("Persimmon", "Persimmon", **SIZES),
]  # fmt: skip

EXPERTS = [
    _experts("Mixtral", "Mixtral", **GROUPED, num_local_experts=4),
    _experts(
        "Qwen2-MoE", "Qwen2Moe", **GROUPED, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, decoder_sparse_step=1,
    ),
    _experts(
        "Qwen3-MoE", "Qwen3Moe", **GROUPED, head_dim=8, num_experts=4,
        moe_intermediate_size=16, decoder_sparse_step=1,
    ),
    _experts(
        "DeepSeek-V3", "DeepseekV3", **SIZES, num_key_value_heads=4, moe_intermediate_size=16,
        n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    ),
    _experts(
        "gpt-oss", "GptOss", **GROUPED, head_dim=8, num_local_experts=4,
        sliding_window=4,
    ),
    _experts("OLMoE", "Olmoe", **GROUPED, num_experts=4),
]  # fmt: skip

STATE_SPACE = [
    _causal("Mamba", "Mamba", "state-space", **TOKENS, hidden_size=32, num_hidden_layers=4, state_size=4),
    _causal(
        "Mamba2", "Mamba2", "state-space", **TOKENS, hidden_size=32, num_hidden_layers=4, state_size=4, num_heads=8,
        head_dim=8, n_groups=2, chunk_size=4,
    ),
    _causal("FalconMamba", "FalconMamba", "state-space", **TOKENS, hidden_size=32, num_hidden_layers=4, state_size=4),
    _causal(
        "RecurrentGemma", "RecurrentGemma", "state-space", **{**GROUPED, "num_key_value_heads": 1}, lru_width=32,
        attention_window_size=4, block_types=["recurrent", "attention"],
    ),
    _causal(
        "RWKV", "Rwkv", "state-space", **TOKENS, hidden_size=32, num_hidden_layers=4, context_length=LENGTH,
        attention_hidden_size=32, intermediate_size=48,
    ),
]  # fmt: skip

ENCODERS = [
    _masked("BERT", "Bert", **SIZES),
    _masked("RoBERTa", "Roberta", **{**SIZES, "pad_token_id": 1}),
    _masked("XLM-R", "XLMRoberta", **{**SIZES, "pad_token_id": 1}),
    _masked("MPNet", "MPNet", **{**SIZES, "pad_token_id": 1}),
    _masked("DistilBERT", "DistilBert", vocab_size=VOCAB, pad_token_id=0, max_position_embeddings=LENGTH, dim=32,
            hidden_dim=48, n_layers=4, n_heads=4),
    _masked(
        "DeBERTa", "Deberta", **SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=-1,
        type_vocab_size=0, position_biased_input=False,
    ),
    _masked(
        "DeBERTa-v2", "DebertaV2", **SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4,
        norm_rel_ebd="layer_norm", share_att_key=True, type_vocab_size=0, position_biased_input=False,
    ),
    _masked("ELECTRA", "Electra", **SIZES, embedding_size=16),
    _masked("ALBERT", "Albert", **SIZES, embedding_size=16),
    _masked("ModernBERT", "ModernBert", **SIZES, global_attn_every_n_layers=2, local_attention=4, cls_token_id=1,
            sep_token_id=2, reference_compile=False),
    _masked("CamemBERT", "Camembert", **{**SIZES, "pad_token_id": 1}),
    _masked("ESM", "Esm", **SIZES, mask_token_id=3, position_embedding_type="rotary"),
]  # fmt: skip

BART: dict[str, Any] = {
    **TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 2 * LENGTH,
    "forced_eos_token_id": None,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 2, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8,
}  # fmt: skip

SEQ2SEQ = [
    _seq2seq("T5", "T5", **T5),
    _seq2seq("mT5", "MT5", **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _seq2seq("BART", "Bart", **BART),
    _seq2seq("mBART", "MBart", **BART),
    _seq2seq("Pegasus", "Pegasus", **BART),
    _seq2seq("Marian", "Marian", head="MTModel", **BART, decoder_vocab_size=VOCAB),
    _seq2seq("M2M-100", "M2M100", **BART),
]
