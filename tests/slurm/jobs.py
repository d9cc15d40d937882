"""Define the module that the jobs train, which writes what each step was computed from."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Recorded(pl.LightningModule):
    """Train a small network, and write each step's loss into a file of the rank.

    Args:
        folder: Folder of the files.
        kill_at: Step before which rank 1 kills itself, in the first start of the job; -1: never.
        seconds: Time that each step takes in addition.
    """

    def __init__(self, folder: str, kill_at: int = -1, seconds: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.folder, self.kill_at, self.seconds = Path(folder), kill_at, seconds

    def training_step(self, batch: Any, index: int) -> Tensor:
        attempt = os.environ.get("SLURM_RESTART_COUNT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if self.global_rank == 1 and self.global_step == self.kill_at and attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        node = os.environ.get("SLURMD_NODENAME", "")
        with (self.folder / f"losses_{self.global_rank}").open("a") as file:
            file.write(f"{attempt} {self.global_step} {loss.item().hex()} {node}\n")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(96, 8, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs[:, 0].gt(0).long()), 4, shuffle=True)


def losses_of(folder: Path, rank: int) -> list[tuple[int, int, str, str]]:
    """Return what a rank has written: the start of the job, the step, the loss and the node, in the order of time."""
    path = folder / f"losses_{rank}"
    rows = [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(attempt), int(step), loss, node) for attempt, step, loss, node in rows]
