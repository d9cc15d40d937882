"""Provide the digits of scikit-learn for diffusion, and noise of which every run validates on the same."""

import torch
from torch.utils.data import TensorDataset

from examples.vision.data import DigitsDataModule


class DiffusionDataModule(DigitsDataModule):
    """Provide images of digits between -1 and 1, and for validation also noise and noise levels.

    Each validation image has its own noise, so that the validation loss depends neither on the number of ranks nor on
    random numbers of the run.

    Args:
        global_batch_size: Number of images in one step over all ranks; each image is on one rank.
        num_noise_levels: Number of noise levels of the model.
    """

    def __init__(self, global_batch_size: int = 64, num_noise_levels: int = 100) -> None:
        super().__init__(global_batch_size)
        self.num_noise_levels = num_noise_levels

    def setup(self, stage: str) -> None:
        """Load, split and scale the images, and draw the noise of validation."""
        super().setup(stage)
        images, digits = self.train_set.tensors
        self.train_set = TensorDataset(2 * images - 1, digits)
        images, digits = self.val_set.tensors
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(images.shape, generator=generator)
        levels = torch.randint(self.num_noise_levels, digits.shape, generator=generator)
        self.val_set = TensorDataset(2 * images - 1, digits, noise, levels)
