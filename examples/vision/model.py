"""Define a small residual network with batch normalisation, and its training."""

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics import Accuracy


class ResidualBlock(nn.Module):
    """Apply two batch-normalised 3x3 convolutions, and add the input to their output."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_channels)
        self.conv2 = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, channels, height, width) to the same shape."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(y)))


class DigitsModule(LightningModule):
    """Classify 8x8 images of digits, and train with SGD and a one-cycle learning rate schedule.

    Args:
        num_channels: Number of channels of every convolution.
        num_blocks: Number of residual blocks after the stem.
        lr: Peak learning rate.
        momentum: Nesterov momentum of SGD.
        weight_decay: Weight decay of all parameters.
    """

    def __init__(
        self,
        num_channels: int = 32,
        num_blocks: int = 3,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Sequential(
            nn.Conv2d(1, num_channels, 3, padding=1, bias=False), nn.BatchNorm2d(num_channels), nn.ReLU()
        )
        self.blocks = nn.Sequential(*(ResidualBlock(num_channels) for _ in range(num_blocks)))
        self.head = nn.Linear(num_channels, 10)
        self.val_accuracy = Accuracy(task="multiclass", num_classes=10)
        self.test_accuracy = Accuracy(task="multiclass", num_classes=10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (batch, 1, 8, 8) to logits of shape (batch, 10)."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy, in nats."""
        images, digits = batch
        loss = functional.cross_entropy(self(images), digits)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss and the accuracy over all ranks."""
        images, digits = batch
        logits = self(images)
        self.val_accuracy(logits, digits)
        self.log("val/loss", functional.cross_entropy(logits, digits), sync_dist=True)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy over all ranks."""
        images, digits = batch
        self.test_accuracy(self(images), digits)
        self.log("test/accuracy", self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the likeliest digits, of shape (batch,)."""
        images, _ = batch
        return self(images).argmax(dim=-1)

    def configure_optimizers(self) -> tuple[list[SGD], list[dict]]:
        """Build SGD, and a learning rate schedule that steps with each optimizer step."""
        hparams = self.hparams
        optimizer = SGD(
            self.parameters(),
            lr=hparams.lr,
            momentum=hparams.momentum,
            nesterov=True,
            weight_decay=hparams.weight_decay,
        )
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, max_lr=hparams.lr, total_steps=num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
