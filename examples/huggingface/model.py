"""Train a causal language model of Hugging Face, in plain transformers and plain Lightning."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


class CausalLM(LightningModule):
    """Train a causal language model with its own loss.

    Args:
        config: Folder that contains a ``config.json``, or the fields of a config with its ``model_type``.
        lr: Learning rate of AdamW.
    """

    def __init__(self, config: str | dict[str, Any], lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config = AutoConfig.from_pretrained(config) if isinstance(config, str) else AutoConfig.for_model(**config)
        self.model = None

    def configure_model(self) -> None:
        """Build the model here and not in ``__init__``, so that a strategy can shard it before allocating weights."""
        if self.model is None:
            self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.get_default_dtype())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy, in nats per token."""
        loss = self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss  # The model shifts the labels.
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean cross entropy over all ranks, in nats per token."""
        loss = self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        self.log("val/loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
