"""Define the data. Each process gets its own part of every batch."""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset


class MyData(L.LightningDataModule):
    """Make random vectors, whose labels are the largest of ten of their features.

    Args:
        batch_size: Number of samples in a batch of a process.
        num_samples: Number of samples for training.
    """

    def __init__(self, batch_size: int = 32, num_samples: int = 8192) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_samples = num_samples

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the loader of the samples for training."""
        return DataLoader(self._samples(self.num_samples, seed=0), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the loader of the samples for validation."""
        return DataLoader(self._samples(1024, seed=1), batch_size=self.batch_size)

    def _samples(self, number: int, seed: int) -> Dataset[tuple[Tensor, ...]]:
        inputs = torch.randn(number, 32, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(inputs, inputs[:, :10].argmax(-1))
