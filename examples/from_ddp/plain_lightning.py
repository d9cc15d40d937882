"""Load a GPT from a consolidated checkpoint by plain Lightning, and compare its loss with that of the training.

Example:
    python -m examples.from_ddp.plain_lightning model.ckpt
"""

import argparse
import sys

import torch
from lightning.pytorch import Trainer

from examples.gpt.data import TextDataModule
from examples.gpt.model import GPTModule


def loss_when_saved(path: str) -> float:
    """Return the validation loss that ModelCheckpoint has stored in its state when it saved the checkpoint.

    Raises:
        ValueError: If the checkpoint has no state of a ModelCheckpoint with a monitored value.
    """
    for name, state in torch.load(path, map_location="cpu", weights_only=True)["callbacks"].items():
        if name.startswith("ModelCheckpoint") and state.get("current_score") is not None:
            return float(state["current_score"])
    raise ValueError(f"{path} has no state of a ModelCheckpoint that monitors val/loss.")


def main() -> int:
    """Validate the checkpoint in one process, print both losses, and return 1 if they differ."""
    parser = argparse.ArgumentParser("python -m examples.from_ddp.plain_lightning")
    parser.add_argument("checkpoint", help="file that lightning-dist checkpoint consolidate has written")
    parser.add_argument("--batches", type=int, default=4, help="limit_val_batches of the training (4)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest accepted difference, in nats (1e-4)")
    options = parser.parse_args()
    module = GPTModule.load_from_checkpoint(options.checkpoint, map_location="cpu", weights_only=True)
    data = TextDataModule.load_from_checkpoint(options.checkpoint, weights_only=True)
    trainer = Trainer(
        accelerator="cpu", devices=1, limit_val_batches=options.batches, logger=False, enable_progress_bar=False
    )
    (result,) = trainer.validate(module, data, verbose=False)
    loss, expected = result["val/loss"], loss_when_saved(options.checkpoint)
    print(f"val/loss of plain Lightning {loss:.5f}, of the training {expected:.5f}")
    if not abs(loss - expected) <= options.tolerance:
        print(f"error: the losses differ by more than {options.tolerance:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
