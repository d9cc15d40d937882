"""Export the trained adapter at the end of a run."""

import json
from pathlib import Path

from lightning.pytorch import Callback, Trainer

from examples.lora.model import LoraModule
from lightning_dist import full_parameters


class ExportAdapter(Callback):
    """Write the adapter in peft's format into the run's folder, and the loss that it has on the held-out text."""

    def on_train_end(self, trainer: Trainer, pl_module: LoraModule) -> None:
        """Gather the shards on all ranks, and write the files on the first rank."""
        folder = Path(trainer.default_root_dir)
        with full_parameters(pl_module):
            if trainer.is_global_zero:
                pl_module.model.save_pretrained(folder / "adapter")
                (folder / "loss.json").write_text(json.dumps(float(trainer.callback_metrics["val/loss"])))
