"""Load the pretrained GPT by plain Lightning, sample from it, and compare its loss with that of the training.

Example:
    python -m examples.pretraining.plain_lightning model.ckpt --run resumed
"""

import argparse
import sys

import torch
from lightning.pytorch import Trainer

from examples.from_ddp.same_losses import losses_of
from examples.gpt.model import GPTModule
from examples.pretraining.data import StreamDataModule


def main() -> int:
    """Print a sample and both losses, and return 1 if they differ or if lightning-dist was needed."""
    parser = argparse.ArgumentParser("python -m examples.pretraining.plain_lightning")
    parser.add_argument("checkpoint", help="file that lightning-dist checkpoint consolidate has written")
    parser.add_argument("--run", required=True, help="name of the run in MLflow whose last val/loss is compared")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes of the training (2)")
    parser.add_argument("--batches", type=int, default=4, help="limit_val_batches of the training (4)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest accepted difference, in nats (1e-4)")
    options = parser.parse_args()
    module = GPTModule.load_from_checkpoint(options.checkpoint, map_location="cpu", weights_only=True)
    data = StreamDataModule.load_from_checkpoint(options.checkpoint, weights_only=True)
    trainer = Trainer(
        accelerator="cpu", devices=1, limit_val_batches=options.batches * options.ranks, logger=False,
        enable_progress_bar=False,
    )  # fmt: skip
    (result,) = trainer.validate(module, data, verbose=False)
    prompt = torch.tensor([list(b"def ")])
    generator = torch.Generator().manual_seed(0)
    text = module.generate(prompt, num_tokens=60, temperature=0.6, top_k=20, generator=generator)[0]
    print("sample:", repr(bytes(text.tolist()).decode(errors="replace")))

    losses = losses_of(options.run, "sqlite:///mlflow.db")
    logged = {step: value for (name, step), value in losses.items() if name == "val/loss"}
    loss, expected = result["val/loss"], logged[max(logged)]
    print(f"val/loss of plain Lightning {loss:.5f}, of the training {expected:.5f}")
    if not abs(loss - expected) <= options.tolerance:
        print(f"error: the losses differ by more than {options.tolerance:g}", file=sys.stderr)
        return 1
    if "lightning_dist" in sys.modules:
        print("error: lightning_dist was imported", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
