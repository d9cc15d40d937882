"""Train a vision transformer of timm, in plain timm and Lightning."""

from typing import Any

import timm
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torchmetrics import Accuracy


class ViTModule(LightningModule):
    """Classify images by a model of timm, trained with AdamW and a one-cycle learning rate schedule.

    Args:
        name: Name of the model in ``timm.list_models()``.
        num_classes: Number of classes.
        options: Further arguments of ``timm.create_model``, such as ``img_size``.
        lr: Peak learning rate.
        weight_decay: Weight decay of all parameters.
    """

    def __init__(
        self,
        name: str,
        num_classes: int = 10,
        options: dict[str, Any] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, num_classes=num_classes, **(options or {}))
        self.val_accuracy = Accuracy(task="multiclass", num_classes=num_classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy, in nats."""
        images, classes = batch
        loss = functional.cross_entropy(self.model(images), classes)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy over all ranks."""
        images, classes = batch
        self.val_accuracy(self.model(images), classes)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Build AdamW, and a learning rate schedule that steps with each optimizer step."""
        hparams = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), lr=hparams.lr, weight_decay=hparams.weight_decay)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=hparams.lr, total_steps=num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
