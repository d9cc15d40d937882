"""Train LoRA adapters of a frozen language model, in plain transformers, peft and Lightning."""

import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM


class LoraModule(LightningModule):
    """Add LoRA adapters to all linear layers of a pretrained causal language model, and train these alone.

    Args:
        base: Folder that ``save_pretrained`` wrote, or to which a model was downloaded.
        rank: Rank of the adapters.
        alpha: Scale of the adapters, which is divided by the rank.
        lr: Learning rate of AdamW.
    """

    def __init__(self, base: str, rank: int = 8, alpha: int = 16, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        model = AutoModelForCausalLM.from_pretrained(base).train()  # It is loaded in eval mode.
        adapters = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(model, adapters)  # freezes all parameters besides the adapters

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
        """Build AdamW for the adapters."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)
