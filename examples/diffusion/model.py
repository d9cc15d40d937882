"""Train a denoising diffusion model (Ho et al., 2020) of digits, in plain diffusers and Lightning."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional


class DiffusionModule(LightningModule):
    """Predict the noise that was added to an image of a digit.

    Args:
        num_channels: Number of channels of the UNet at full resolution, a multiple of 8.
        num_noise_levels: Number of noise levels, between an image and noise alone.
        lr: Learning rate of AdamW.
    """

    def __init__(self, num_channels: int = 32, num_noise_levels: int = 100, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.unet = UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            block_out_channels=(num_channels, 2 * num_channels),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=8,
            num_class_embeds=10,  # the digits
        )
        self.scheduler = DDPMScheduler(num_noise_levels, beta_schedule="squaredcos_cap_v2")

    def loss(self, images: Tensor, digits: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Return the mean squared error of the predicted noise.

        Args:
            images: Images of shape (batch, 1, 8, 8), between -1 and 1.
            digits: Their digits, of shape (batch,).
            noise: Noise to add to them, of shape (batch, 1, 8, 8).
            levels: Noise levels of shape (batch,), between 0 and ``num_noise_levels`` - 1.
        """
        noisy = self.scheduler.add_noise(images, noise, levels)
        return functional.mse_loss(self.unet(noisy, levels, class_labels=digits).sample, noise)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss at random noise levels."""
        images, digits = batch
        levels = torch.randint(self.hparams.num_noise_levels, digits.shape, device=self.device)
        loss = self.loss(images, digits, torch.randn_like(images), levels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss over all ranks, for the noise that the data module provides."""
        self.log("val/loss", self.loss(*batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    @torch.no_grad()
    def sample(self, digits: Tensor, generator: torch.Generator) -> Tensor:
        """Return an image of shape (1, 8, 8) for each of ``digits``, between -1 and 1, drawn from noise."""
        images = torch.randn(len(digits), 1, 8, 8, generator=generator)
        self.scheduler.set_timesteps(self.hparams.num_noise_levels)
        for level in self.scheduler.timesteps:
            noise = self.unet(images, level, class_labels=digits).sample
            images = self.scheduler.step(noise, level, images, generator=generator).prev_sample
        return images.clamp(-1, 1)
