"""Load the exported adapter in plain transformers and peft, and compare its loss with that of the run."""

import itertools
import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from examples.gpt.data import TextDataModule  # the held-out text; nothing else is from this repository

NUM_BATCHES = 5  # limit_val_batches of base.yaml
TOLERANCE = 1e-4  # nats per byte


@torch.no_grad()
def held_out_loss(model: torch.nn.Module) -> float:
    """Return the mean cross entropy of the text on which the run has validated, in nats per byte."""
    data = TextDataModule(context=64, global_batch_size=16)  # as in base.yaml
    data.setup("validate")
    batches = itertools.islice(data.val_dataloader(), NUM_BATCHES)
    losses = [model(input_ids=inputs, labels=inputs).loss for inputs, _ in batches]
    return torch.stack(losses).mean().item()


def main(runs: list[Path]) -> None:
    """Print the losses of the base model, and of the model with the adapter of each run.

    Raises:
        SystemExit: If an adapter has another loss than its run.
    """
    model = AutoModelForCausalLM.from_pretrained("runs/lora/base").eval()
    print(f"base model alone: {held_out_loss(model):.4f}")
    for run in runs:
        model = AutoModelForCausalLM.from_pretrained("runs/lora/base")
        loss = held_out_loss(PeftModel.from_pretrained(model, run / "adapter").eval())
        loss_of_run = json.loads((run / "loss.json").read_text())
        print(f"adapter of {run}: {loss:.4f}, and {loss_of_run:.4f} in the run")
        if not abs(loss - loss_of_run) < TOLERANCE:
            sys.exit(f"The adapter of {run} has another loss than the run, by {abs(loss - loss_of_run):.1e}.")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
