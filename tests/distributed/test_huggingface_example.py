"""Test that the Hugging Face example loads the same weights and has the same loss with each of its overlays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.test_examples import SHORT_SAMPLE, curves, fit_on_rank
from tests.pool import WorkerPool

FLAGS = [
    "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1", "--trainer.num_sanity_val_steps=0",
    "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
    "--data.init_args.max_bytes=100000", "--data.init_args.val_fraction=0.2", "--data.init_args.context=16",
]  # fmt: skip


def save_llama(folder: Path) -> None:
    """Save a tiny Llama with random weights, as a pretrained model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.thorough
def test_pretrained_weights_have_the_same_loss_under_each_strategy(pool: WorkerPool, mlflow_folder: Path) -> None:
    save_llama(mlflow_folder / "pretrained")
    sizes = ["--trainer.strategy.dp_replicate_size=2", "--trainer.strategy.dp_shard_size=1"]
    small_gpt = ["--model.init_args.dim=32", "--model.init_args.num_layers=2", "--model.init_args.num_heads=2"]
    strategies = {"full_shard": [], "hybrid_shard": sizes, "tensor_parallel": [], "ddp": []}
    runs = [([f"huggingface/{name}", "huggingface/pretrained"], flags) for name, flags in strategies.items()]
    # Both examples also run with randomly initialized weights.
    runs.append((["huggingface/full_shard"], ["--trainer.logger.init_args.run_name=drawn"]))
    runs.append((["gpt/tensor_parallel"], [*small_gpt, SHORT_SAMPLE, "--trainer.logger.init_args.run_name=gpt"]))
    for overlays, flags in runs:
        assert pool.run(fit_on_rank, 2, mlflow_folder, overlays, [*FLAGS, *flags]) == [0, 0]

    losses = {name: metrics["val/loss"] for name, metrics in curves(mlflow_folder).items()}
    assert sorted(losses) == sorted([*strategies, "drawn", "gpt"])
    assert len(losses["ddp"]) == 1
    for name in strategies:
        assert losses[name] == pytest.approx(losses["ddp"], abs=1e-4)
    for name in ("drawn", "gpt"):
        (loss,) = losses[name].values()
        assert 4 < loss < 7
