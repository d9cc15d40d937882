"""Train the examples' GPT on a rank that ``soak`` starts by torchrun, and record every loss."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.gpt.data import TextDataModule
from examples.gpt.model import GPTModule
from lightning_dist.plugins.callbacks import FaultTolerance


class Diary(pl.Callback):
    """Record the start of this process, and each step with its number, this rank's exact loss, and the time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"rank{os.environ['RANK']}.txt"

    def note(self, *what: Any) -> None:
        with open(self._path, "a") as file:
            print(*what, file=file, flush=True)

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.note("process", os.getpid(), trainer.global_step, trainer.world_size)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.note("step", trainer.global_step, float(outputs["loss"]).hex(), time.monotonic())


def train(folder: Path, num_steps: int) -> None:
    """Train until step ``num_steps``, resuming from the newest checkpoint in ``folder`` if there is one."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    # The example has no dropout, so this training does not check that random number generators are resumed.
    module = GPTModule(dim=48, num_layers=2, num_heads=2, max_len=32, lr=3e-3, warmup_steps=30)
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="full_shard", max_steps=num_steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=2, val_check_interval=25, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, gradient_clip_val=1.0, default_root_dir=folder,
        callbacks=[
            Diary(folder),
            ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=5, save_top_k=2,
                            monitor="step", mode="max"),
            FaultTolerance(hang_timeout=30),
        ],
    )  # fmt: skip
    data = TextDataModule(context=32, global_batch_size=12, max_bytes=200_000)
    trainer.fit(module, data, ckpt_path="auto")


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
