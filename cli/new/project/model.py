"""Define what is trained. It is ordinary Lightning code, which does not say how it is distributed."""

import lightning as L
import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Add what two layers compute to their input. The strategies shard, split and distribute such repeated blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and what was added to it, of the same shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class MyModule(L.LightningModule):
    """Classify vectors.

    Args:
        width: Number of features inside of the network.
        num_blocks: Number of blocks.
        lr: Learning rate of the optimizer.
    """

    def __init__(self, width: int = 128, num_blocks: int = 4, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.enter = nn.Linear(32, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.leave = nn.Linear(width, 10)
        self.lr = lr

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of vectors of shape ``[batch, 32]``."""
        return self.leave(self.blocks(self.enter(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss and the accuracy, each averaged over all processes."""
        inputs, labels = batch
        logits = self(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("val/loss", loss, sync_dist=True, prog_bar=True)
        self.log("val/accuracy", (logits.argmax(-1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
