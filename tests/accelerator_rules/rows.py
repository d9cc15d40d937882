"""Define the rows of the table of host waits: a strategy, a model, and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_dist import (
    ContextParallelStrategy,
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_dist.plugins.callbacks import GradientNoiseScale
from lightning_dist.techniques.compression import BF16, FP8, Compressor, Int8, PowerSGD, TopK
from tests.expert_models import COMMON
from tests.models import MODELS, TestModule, build
from tests.pipeline_models import PIPELINE_MODELS
from tests.split_models import RoundingLanguageModel

__all__ = ["ROWS", "Row"]


class GroupedMixture(RoundingLanguageModel):
    """Compute with all experts of a rank by one grouped product."""

    def make_model(self) -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            intermediate_size=40, moe_intermediate_size=16, num_key_value_heads=2, head_dim=8, num_experts=8,
            num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1,
            **{**COMMON, "hidden_size": 32, "experts_implementation": "grouped_mm"},
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config)


MODELS["grouped_moe"] = GroupedMixture
assert "deep_mixtral" in PIPELINE_MODELS


@dataclass(frozen=True)
class Row:
    """Describe a training run.

    Args:
        make: Function that returns the strategy, given more arguments of it.
        model: Name of the model.
        num_ranks: Number of ranks.
        clip: Norm to which gradients are clipped.
        checkpointing: The strategy's ``activation_checkpointing``.
        optimizer: Name of the model's optimizer.
        is_stream: Whether the training data have no length, so that ranks agree on each batch.
        observes_noise: Whether the gradient noise scale is estimated, and the ranks add up its sums every second step.
    """

    make: Callable[..., Any]
    model: str
    num_ranks: int = 2
    clip: float | None = None
    checkpointing: str | None = None
    optimizer: str = "sgd"
    is_stream: bool = False
    observes_noise: bool = False

    def strategy(self) -> Any:
        """Return the strategy."""
        return self.make(**({"activation_checkpointing": self.checkpointing} if self.checkpointing else {}))

    def build(self, seed: int) -> TestModule:
        """Return the model with weights that are drawn from ``seed``."""
        return build(self.model, seed=seed, optimizer=self.optimizer)

    def callbacks(self) -> list[pl.Callback]:
        """Return the callbacks of the run."""
        return [GradientNoiseScale(log_every_n_steps=2)] if self.observes_noise else []

    def data(self, model: TestModule) -> Any:
        """Return the training data, if they are not those of the model."""
        return Stream(model) if self.is_stream else None


class Stream:
    """Yield the training batches of a model, without a length.

    Args:
        model: Model with a ``train_dataloader``.
    """

    def __init__(self, model: TestModule) -> None:
        self._model = model

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches."""
        return iter(self._model.train_dataloader())


def _context(attention: str) -> Callable[..., Any]:
    return lambda **kwargs: ContextParallelStrategy(2, attention=attention, **kwargs)


_PLAIN: dict[str, tuple[Callable[..., Any], str, int]] = {
    "data_parallel": (lambda **kwargs: DataParallelStrategy(**kwargs), "llama", 2),
    "data_parallel, batch norm": (lambda **kwargs: DataParallelStrategy(**kwargs), "resnet", 2),
    "data_parallel, frozen parameter": (lambda **kwargs: DataParallelStrategy(**kwargs), "gpt", 2),
    "full_shard": (lambda **kwargs: FullShardStrategy(**kwargs), "llama", 2),
    "full_shard, scalar parameter": (lambda **kwargs: FullShardStrategy(**kwargs), "gpt", 2),
    "hybrid_shard": (lambda **kwargs: HybridShardStrategy(2, 2, **kwargs), "llama", 4),
    "tensor_parallel": (lambda **kwargs: TensorParallelStrategy(2, **kwargs), "llama", 2),
    "context_parallel, ulysses": (_context("ulysses"), "llama", 2),
    "context_parallel, all_gather": (_context("all_gather"), "llama", 2),
    "pipeline_parallel, 1f1b": (
        lambda **kwargs: PipelineParallelStrategy(2, num_microbatches=4, **kwargs), "deep_llama", 2,
    ),
    "expert parallel": (lambda **kwargs: FullShardStrategy(ep_size=2, **kwargs), "deep_mixtral", 2),
    "expert parallel, grouped products": (lambda **kwargs: FullShardStrategy(ep_size=2, **kwargs), "grouped_moe", 2),
    "expert parallel, grouped products and capacity": (
        lambda **kwargs: FullShardStrategy(ep_size=2, expert_capacity=8, **kwargs), "grouped_moe", 2,
    ),
    "experts over tp, grouped products and capacity": (
        lambda **kwargs: TensorParallelStrategy(2, expert_capacity=8, **kwargs), "grouped_moe", 2,
    ),
}  # fmt: skip
ROWS: dict[str, Row] = {}
for _name, (_make, _model, _size) in _PLAIN.items():
    ROWS[_name] = Row(_make, _model, _size)
    ROWS[f"{_name}, clip"] = Row(_make, _model, _size, clip=0.1)
    if _model != "resnet":  # It has no repeated blocks.
        ROWS[f"{_name}, activation checkpointing"] = Row(_make, _model, _size, checkpointing="full")
_COMPRESSORS: list[Compressor] = [
    BF16(),
    FP8(block_size=64, min_numel=64),
    Int8(block_size=64, min_numel=64),
    PowerSGD(rank=2, min_numel=64, min_compression_rate=1.0),
    TopK(ratio=0.05, block_size=100, min_numel=64),
]
for _each in _COMPRESSORS:
    ROWS[f"data_parallel, {_each}"] = Row(
        lambda compressor=_each, **kwargs: DataParallelStrategy(compression=compressor, **kwargs), "llama"
    )
ROWS["hybrid_shard, int8"] = Row(
    lambda **kwargs: HybridShardStrategy(2, 2, compression=_COMPRESSORS[2], **kwargs), "llama", 4
)
ROWS["full_shard, stream"] = replace(ROWS["full_shard"], is_stream=True)
for _name in ("data_parallel", "full_shard", "hybrid_shard"):
    ROWS[f"{_name}, noise scale"] = replace(ROWS[_name], observes_noise=True)
ROWS["data_parallel, int8, AdamW"] = replace(ROWS["data_parallel, int8"], optimizer="adamw")
ROWS["data_parallel, int8, fused optimizer"] = replace(ROWS["data_parallel, int8"], optimizer="fused_adamw")
ROWS["data_parallel, int8, optimizer that is not fused"] = replace(
    ROWS["data_parallel, int8"], optimizer="foreach_adamw"
)
"""All rows by name."""
