"""Provide the digits that scikit-learn contains: 1,797 grey images of 8x8 pixels, which need no download."""

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import per_rank_batch_size

# Validation and testing each use this number of images, which 2, 4, 8... ranks share without repeating an image.
NUM_HELD_OUT = 256


class DigitsDataModule(LightningDataModule):
    """Provide images of shape (1, 8, 8), float32 between 0 and 1, with their digits, int64, in a fixed split.

    Args:
        global_batch_size: Number of images in one step over all ranks; each image is on one rank.
        num_workers: Number of DataLoader workers on each rank.
    """

    def __init__(self, global_batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.global_batch_size = global_batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Load and split the images.

        Raises:
            ValueError: If the batch cannot be split evenly over the ranks.
        """
        self.batch_size = per_rank_batch_size(self.global_batch_size, self.trainer)
        bunch = load_digits()
        images = torch.tensor(bunch.images / 16.0, dtype=torch.float32).unsqueeze(1)
        digits = torch.tensor(bunch.target)
        rest, test = train_test_split(range(len(digits)), test_size=NUM_HELD_OUT, stratify=bunch.target, random_state=0)
        train, val = train_test_split(rest, test_size=NUM_HELD_OUT, stratify=bunch.target[rest], random_state=0)
        self.train_set = TensorDataset(images[train], digits[train])
        self.val_set = TensorDataset(images[val], digits[val])
        self.test_set = TensorDataset(images[test], digits[test])

    def train_dataloader(self) -> DataLoader:
        """Return a loader of shuffled training images, without the last incomplete batch."""
        return DataLoader(
            self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader:
        """Return a loader of the validation images."""
        return DataLoader(self.val_set, batch_size=self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        """Return a loader of the test images."""
        return DataLoader(self.test_set, batch_size=self.batch_size, num_workers=self.num_workers)

    def predict_dataloader(self) -> DataLoader:
        """Return a loader of the test images."""
        return self.test_dataloader()
