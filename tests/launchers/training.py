"""Train a module that writes what it computes in each step, and compare it with a training that nothing interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 24
SECONDS = 500.0
"""The longest time that a scenario may wait for something."""

Scenario = Callable[[Path, dict[int, str]], str]
"""A function that trains in a folder, compares the losses with the expected ones by step, and returns what it saw."""

_CONFIGURATION = """\
seed_everything: 1
model:
  class_path: tests.launchers.training.Recorded
  init_args: {{folder: {folder}, kill_at: {kill_at}, seconds: {seconds}}}
trainer:
  accelerator: cpu
  strategy: full_shard
  max_epochs: 2
  logger: false
  default_root_dir: {folder}
  enable_progress_bar: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {folder}/checkpoints, every_n_train_steps: 2, save_top_k: -1}}
    - class_path: lightning_dist.FaultTolerance
"""


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
        # The folder of the logs is that of a start, attempt_A under SLURM and start_K on Ray.
        attempt = Path(os.environ.get("LIGHTNING_DIST_LAUNCH_LOGS", "")).name.rpartition("_")[2]
        attempt = attempt if attempt.isdigit() else "0"
        if self.global_rank == 1 and self.global_step == self.kill_at and attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        node = os.environ.get("SLURMD_NODENAME", "-")
        total = len(labels) * self.trainer.world_size
        with (self.folder / f"losses_{self.global_rank}").open("a") as file:
            file.write(f"{attempt} {self.global_step} {loss.item().hex()} {node} {total} {time.time()}\n")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(96, 8, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs[:, 0].gt(0).long()), 4, shuffle=True)


def fit(folder: Path, callbacks: Sequence[pl.Callback] = (), **sizes: int) -> None:
    """Train as the configuration of :func:`configure` says, in a rank that something has started.

    Args:
        folder: Folder of the training.
        callbacks: Further callbacks.
        sizes: The Trainer's ``devices`` and ``num_nodes``.
    """
    pl.seed_everything(1)
    every_2_steps = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="full_shard",
        max_epochs=2,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        callbacks=[every_2_steps, *callbacks],
        **sizes,
    )
    trainer.fit(Recorded(str(folder)))


class Row(NamedTuple):
    """What a rank has written in a step."""

    start: int
    step: int
    loss: str
    node: str
    global_batch: int
    seconds: float
    """Time of day when the loss was known."""


def losses_of(folder: Path, rank: int) -> list[Row]:
    """Return what a rank has written, in the order of time."""
    path = folder / f"losses_{rank}"
    rows = [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []
    return [Row(int(a), int(step), loss, node, int(total), float(at)) for a, step, loss, node, total, at in rows]


def configure(folder: Path, kill_at: int = -1, seconds: float = 0.0) -> Path:
    """Write the configuration of a training of :data:`NUM_STEPS` steps into an empty folder."""
    folder.mkdir()
    path = folder / "my.yaml"
    path.write_text(_CONFIGURATION.format(folder=folder, kill_at=kill_at, seconds=seconds))
    return path


def uninterrupted(folder: Path) -> dict[int, str]:
    """Train with two ranks that ``launch`` starts on this node, and return the losses of rank 0 by step."""
    words = ["launch", "--devices=2", f"--logs={folder / 'logs'}", "--", "fit", "-c", str(configure(folder))]
    subprocess.run([sys.executable, "-m", "lightning_dist.cli", *words], check=True, capture_output=True)
    losses = {row.step: row.loss for row in losses_of(folder, 0)}
    assert len(losses) == NUM_STEPS
    return losses


def check(folder: Path, expected: dict[int, str], num_starts: int) -> str:
    """Compare the losses of rank 0 with those of a training that nothing has interrupted, bit by bit.

    Args:
        folder: Folder of the training.
        expected: The losses by step.
        num_starts: How often the job must have been started.

    Returns:
        A sentence on what was compared.
    """
    rows = losses_of(folder, 0)
    starts = sorted({row.start for row in rows})
    assert len(starts) == num_starts, f"the job was started {len(starts)} times, and not {num_starts}"
    assert {row.step for row in rows} == set(expected), "not every step was computed"
    wrong = [(row.start, row.step) for row in rows if row.loss != expected[row.step]]
    assert not wrong, f"other losses in (start, step) {wrong}"
    return f"{len(rows)} steps of {num_starts} starts, {len(rows) - len(expected)} of them twice, are bit-identical"


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait until ``condition`` is true.

    Raises:
        AssertionError: If it is not within ``seconds``.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"nothing happened for {seconds:.0f} s"
        time.sleep(0.2)


def run_scenarios(scenarios: Sequence[Scenario], names: Sequence[str], folder: Path, expected: dict[int, str]) -> int:
    """Run scenarios, print the result of each, and return 1 if one of them found a defect, otherwise 0.

    Args:
        scenarios: All scenarios.
        names: Names of those that run; empty: all.
        folder: Folder in which each of them gets a folder.
        expected: The losses of a training that nothing interrupts, by step.
    """
    failed = 0
    for scenario in scenarios:
        if names and scenario.__name__ not in names:
            continue
        begin = time.monotonic()
        try:
            result = scenario(folder / scenario.__name__, expected)
        except AssertionError as error:
            failed += 1
            result = f"FAILED: {error}"
        print(f"{scenario.__name__:<14} {result}  ({time.monotonic() - begin:.0f} s)", flush=True)
    return int(failed > 0)
