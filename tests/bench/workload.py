"""Define the size of the examples' GPT, and batches that are the same for every way of training it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from examples.gpt.data import ByteWindows, TextDataModule

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """Configure the size of the model and of its batches.

    Args:
        dim: Width of the hidden states.
        num_layers: Number of blocks.
        num_heads: Number of attention heads of a block.
        context: Number of bytes in a window.
        global_batch_size: Number of windows in a step, over all ranks.
        num_steps: Length of the learning rate's schedule in steps; more than are ever run.
        seed: Seed of the weights.
        text: Path of the file that is trained on. None: the source of Python's standard library.
        device: Type of the device to train on: ``"cpu"`` or ``"cuda"``.
    """

    dim: int = 192
    num_layers: int = 4
    num_heads: int = 6
    context: int = 128
    global_batch_size: int = 16
    num_steps: int = 10_000
    seed: int = 1
    text: str | None = None
    device: str = "cpu"

    @property
    def model(self) -> dict[str, Any]:
        """Return the arguments of the examples' ``GPT`` and ``GPTModule``."""
        return {
            "dim": self.dim,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "max_len": self.context,
        }

    def loader(self, num_replicas: int | None = None, rank: int | None = None) -> DataLoader[Any]:
        """Make a loader of one part of each global batch; the windows are shuffled once.

        Args:
            num_replicas: Number of parts. None: the world size.
            rank: Index of the part. None: this rank.
        """
        windows = self.windows()
        num_replicas = int(os.environ["WORLD_SIZE"]) if num_replicas is None else num_replicas
        rank = int(os.environ["RANK"]) if rank is None else rank
        sampler = DistributedSampler(windows, num_replicas, rank, drop_last=True)
        return DataLoader(windows, self.global_batch_size // num_replicas, sampler=sampler, drop_last=True)

    def windows(self) -> ByteWindows:
        """Return the windows of the text that are trained on."""
        return _windows(self.text, self.context)

    def batches(self, num_replicas: int | None = None, rank: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the loader on the device, over and over."""
        while True:
            for inputs, targets in self.loader(num_replicas, rank):
                yield inputs.to(self.device), targets.to(self.device)


@cache
def _windows(text: str | None, context: int) -> ByteWindows:
    data = TextDataModule(text, context=context, global_batch_size=1)
    data.setup("fit")
    return data.train_windows
