"""Define models and ways of training whose memory is predicted and measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from examples.gpt.model import GPTModule
from examples.huggingface.model import CausalLM
from examples.vision.model import DigitsModule
from lightning_dist import NDParallelStrategy

__all__ = ["CASES", "MODELS", "Case", "make"]

_HF = {
    "vocab_size": 256, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def _gpt() -> LightningModule:
    return GPTModule(dim=256, num_layers=6, num_heads=8, max_len=128, lr=3e-3, warmup_steps=30)


def _gpt_of_6_heads() -> LightningModule:
    return GPTModule(dim=192, num_layers=4, num_heads=6, max_len=128, lr=3e-3, warmup_steps=30)


def _llama() -> LightningModule:
    return CausalLM({"model_type": "llama", "intermediate_size": 688, "num_hidden_layers": 6, **_HF})


def _experts() -> LightningModule:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3, "intermediate_size": 512}
    return CausalLM({"model_type": "mixtral", **sizes, **_HF})


def _cnn() -> LightningModule:
    return DigitsModule(num_channels=128, num_blocks=6)


class _Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Hold enough sequences for thousands of ranks, which are few different ones."""

    def __init__(self) -> None:
        self._tokens = torch.randint(0, 90, (128, 129), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 2**17

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self._tokens[index % len(self._tokens)]
        return tokens[:-1], tokens[1:]


def _images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(512, 1, 8, 8, generator=generator), torch.arange(512) % 10)


MODELS: dict[str, tuple[Callable[[], LightningModule], Callable[[], Dataset[Any]], int]] = {
    "GPT": (_gpt, _Tokens, 8),
    "GPT with 6 heads": (_gpt_of_6_heads, _Tokens, 8),
    "Llama": (_llama, _Tokens, 8),
    "Mixtral": (_experts, _Tokens, 8),
    "CNN": (_cnn, _images, 64),
}
"""The function that makes each model, that which makes its dataset, and the batch size of a rank."""


@dataclass(frozen=True)
class Case:
    """Hold a model and a way to train it.

    Args:
        model: Key of :data:`MODELS`.
        num_ranks: Number of processes.
        sizes: Sizes of the axes, and other arguments of the strategy.
        trainer: Further arguments of the Trainer.
    """

    model: str
    num_ranks: int
    sizes: Mapping[str, Any]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 0.01
    """The largest accepted relative error of the predicted memory."""

    @property
    def ranks(self) -> range:
        """Return one rank of each stage; the other ranks need the same memory."""
        return range(0, self.num_ranks, self.num_ranks // self.sizes.get("pp_size", 1))

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in {**self.sizes, **self.trainer}.items())
        return f"{self.model}, {self.num_ranks} ranks, {given}"


CASES = [
    Case("GPT", 2, {"dp_shard_size": 2}),
    Case("GPT", 2, {"tp_size": 2}),
    Case("GPT", 2, {"cp_size": 2}),
    Case("GPT", 2, {"cp_size": 2, "attention": "all_gather"}),
    Case("GPT", 2, {"pp_size": 2, "num_microbatches": 4}),
    Case("GPT", 2, {"dp_replicate_size": 2}),
    Case("GPT", 4, {"dp_shard_size": 2, "dp_replicate_size": 2}),
    Case("GPT", 4, {"dp_shard_size": 2, "tp_size": 2}),
    Case("GPT", 4, {"dp_shard_size": 2, "pp_size": 2, "num_microbatches": 4}),
    # The heads do not divide, so that only feed-forward layers and the vocabulary are split.
    Case("GPT with 6 heads", 4, {"tp_size": 4}),
    Case("GPT", 2, {"dp_shard_size": 2, "activation_checkpointing": "full"}),
    Case("GPT", 2, {"dp_shard_size": 2}, {"accumulate_grad_batches": 2}),
    Case("Llama", 2, {"dp_shard_size": 2}),
    Case("Llama", 2, {"tp_size": 2}),
    Case("Llama", 2, {"cp_size": 2}),
    Case("Llama", 2, {"pp_size": 2, "num_microbatches": 4}),
    Case("Llama", 4, {"dp_shard_size": 2, "cp_size": 2}),
    Case("Mixtral", 2, {"dp_shard_size": 2}),
    Case("Mixtral", 2, {"dp_shard_size": 2, "ep_size": 2}),
    # The prediction spreads tokens equally over experts, and the router of this model does not.
    Case("Mixtral", 2, {"tp_size": 2}, tolerance=0.05),
    Case("CNN", 2, {"dp_replicate_size": 2}),
    Case("CNN", 2, {"dp_shard_size": 2}),
    Case("CNN", 2, {"dp_shard_size": 2, "activation_checkpointing": "full"}),
]
"""The ways of training, of which those with ``tp_size``, ``cp_size`` and ``pp_size`` split the model."""


def make(case: Case) -> tuple[LightningModule, DataLoader[Any], dict[str, Any]]:
    """Return the module of a case, its loader, and the arguments of a Trainer."""
    make_module, make_data, batch_size = MODELS[case.model]
    sizes = {"dp_replicate_size": 1, "dp_shard_size": 1, **copy.deepcopy(dict(case.sizes))}
    torch.manual_seed(0)
    strategy = NDParallelStrategy(**sizes)
    return make_module(), DataLoader(make_data(), batch_size=batch_size), {"strategy": strategy, **case.trainer}
