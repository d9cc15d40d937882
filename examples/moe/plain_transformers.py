"""Load a folder by plain transformers, and compare the loss of its model with that of the training.

Example:
    python -m examples.moe.plain_transformers mixture --checkpoint mixture.ckpt
"""

import argparse
import sys
from itertools import islice

import torch
from lightning.pytorch import Trainer
from transformers import AutoModelForCausalLM

from examples.from_ddp.plain_lightning import loss_when_saved
from examples.gpt.data import TextDataModule


def main() -> int:
    """Print both losses, and return 1 if they differ."""
    parser = argparse.ArgumentParser("python -m examples.moe.plain_transformers")
    parser.add_argument("folder", help="folder that save_pretrained has written")
    parser.add_argument("--checkpoint", required=True, help="checkpoint, for the data and the loss of the training")
    parser.add_argument("--batches", type=int, default=4, help="limit_val_batches of the training (4)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest accepted difference, in nats (1e-4)")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.folder).eval()

    data = TextDataModule.load_from_checkpoint(options.checkpoint, weights_only=True)
    data.trainer = Trainer(accelerator="cpu", devices=1, logger=False)  # It says that one process reads the data.
    data.setup("validate")
    with torch.no_grad():
        losses = [
            model(input_ids=inputs, labels=inputs).loss for inputs, _ in islice(data.val_dataloader(), options.batches)
        ]
    loss, expected = float(torch.stack(losses).mean()), loss_when_saved(options.checkpoint)
    print(f"loss of plain transformers {loss:.5f}, val/loss of the training {expected:.5f}")
    if not abs(loss - expected) <= options.tolerance:
        print(f"error: the losses differ by more than {options.tolerance:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
