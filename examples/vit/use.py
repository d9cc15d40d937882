"""Load the weights of runs in plain timm, and compare their accuracies with those of the runs."""

import csv
import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

from examples.vision.data import DigitsDataModule  # the images; nothing else is from this repository

NAME = "vit_tiny_patch16_224"  # as in base.yaml
OPTIONS = {
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "class_token": False,
    "global_pool": "avg",
    "embed_dim": 64,
    "depth": 3,
    "num_heads": 4,
}


def load_model(file: Path) -> torch.nn.Module:
    """Return the model with the weights of a safetensors file."""
    model = timm.create_model(NAME, num_classes=10, **OPTIONS)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()})
    return model.eval()


@torch.no_grad()
def accuracy(model: torch.nn.Module) -> float:
    """Return the fraction of the validation images that the model classifies correctly."""
    data = DigitsDataModule()
    data.setup("validate")
    images, digits = data.val_set.tensors
    return (model(images).argmax(dim=-1) == digits).double().mean().item()


def accuracy_of_run(run: Path) -> float:
    """Return the last accuracy that the run has logged."""
    with (run / "metrics.csv").open() as file:
        return [float(row["val/accuracy"]) for row in csv.DictReader(file) if row["val/accuracy"]][-1]


def main(runs: list[Path]) -> None:
    """Print the accuracies of the weights and of the runs.

    Raises:
        SystemExit: If weights have another accuracy than their run.
    """
    for run in runs:
        here, there = accuracy(load_model(run / "vit.safetensors")), accuracy_of_run(run)
        print(f"{run}: accuracy {here:.4f}, and {there:.4f} in the run")
        if not abs(here - there) < 1e-6:
            sys.exit(f"The weights of {run} have another accuracy than the run.")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
