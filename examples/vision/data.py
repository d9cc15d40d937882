"""scikit-learn's bundled digits: 1,797 grey images of 8x8 pixels, nothing to download."""

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

from examples.batching import per_rank_batch_size

NUM_HELD_OUT = 256  # images to validate, and as many to test: a number that 2, 4, 8... ranks share without repeats


class DigitsDataModule(LightningDataModule):
    """Images (1, 8, 8), float32 between 0 and 1, with their digits, int64; always the same split.

    Args:
        global_batch_size: Images in a step over all ranks, each image on one rank.
        num_workers: Loader processes of a rank.
    """

    def __init__(self, global_batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.global_batch_size = global_batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Load and split the images.

        Raises:
            ValueError: The batch cannot be split evenly over the ranks.
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
        """Shuffled images, the last incomplete batch dropped."""
        return DataLoader(
            self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader:
        """The images to validate."""
        return DataLoader(self.val_set, batch_size=self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        """The images to test."""
        return DataLoader(self.test_set, batch_size=self.batch_size, num_workers=self.num_workers)

    def predict_dataloader(self) -> DataLoader:
        """The images to test."""
        return self.test_dataloader()
