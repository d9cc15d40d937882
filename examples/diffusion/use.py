"""Load the averaged weights of runs, compare their losses with those of the runs, and draw digits."""

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from examples.diffusion.data import DiffusionDataModule
from examples.diffusion.model import DiffusionModule

NUM_OF_EACH = 4  # images of each digit in the picture
TOLERANCE = 1e-4


@torch.no_grad()
def held_out_loss(module: DiffusionModule) -> float:
    """Return the loss on the validation images, with the noise of the runs."""
    data = DiffusionDataModule()
    data.setup("validate")
    return module.loss(*data.val_set.tensors).item()


def loss_of_run(run: Path) -> float:
    """Return the last validation loss that the run has logged."""
    with (run / "metrics.csv").open() as file:
        return [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]][-1]


def draw(module: DiffusionModule, file: Path) -> None:
    """Write a picture with samples, in which each column has one digit."""
    digits = torch.arange(10).repeat(NUM_OF_EACH)
    images = module.sample(digits, torch.Generator().manual_seed(0))
    rows = images.reshape(NUM_OF_EACH, 10, 8, 8).transpose(1, 2)
    picture = rows.reshape(NUM_OF_EACH * 8, 10 * 8).repeat_interleave(4, dim=0).repeat_interleave(4, dim=1)
    plt.imsave(file, picture.numpy(), cmap="gray", vmin=-1, vmax=1)


def main(runs: list[Path]) -> None:
    """Print the losses of the weights and of the runs, and draw samples.

    Raises:
        SystemExit: If weights have another loss than their run.
    """
    for run in runs:
        module = DiffusionModule.load_from_checkpoint(run / "diffusion.ckpt", map_location="cpu").eval()
        here, there = held_out_loss(module), loss_of_run(run)
        print(f"{run}: loss {here:.4f}, and {there:.4f} in the run")
        if not abs(here - there) < TOLERANCE:
            sys.exit(f"The weights of {run} have another loss than the run, by {abs(here - there):.1e}.")
        draw(module, run / "samples.png")
        print(f"{run / 'samples.png'} has {NUM_OF_EACH} samples of each digit.")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
