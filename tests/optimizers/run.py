"""Train a small module with an optimizer under a strategy or in one process."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_dist import (
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    TensorParallelStrategy,
)
from tests.behaviour.models import Block
from tests.distributed.fit import Weights, make_trainer, weights_of
from tests.models import TestModule
from tests.optimizers.makers import makers

__all__ = ["STRATEGIES", "WORLD_SIZES", "train", "train_all"]

STRATEGIES: dict[str, Any] = {
    "full_shard": lambda: FullShardStrategy(),
    "zero 1": lambda: FullShardStrategy(zero_stage=1),
    "zero 2": lambda: FullShardStrategy(zero_stage=2),
    "tensor_parallel": lambda: TensorParallelStrategy(tp_size=2, strict_plan=False),
    "data_parallel": lambda: DataParallelStrategy(),
    "hybrid_shard": lambda: HybridShardStrategy(2, 2),
}
WORLD_SIZES = {name: 4 if name == "hybrid_shard" else 2 for name in STRATEGIES}

NUM_STEPS = 4
VOCABULARY, WIDTH, LENGTH = 24, 12, 6


class Net(TestModule):
    """Predict tokens by an embedding, a convolution, two blocks and a head."""

    num_samples = 64

    def __init__(self, name: str, width: int = WIDTH, reverses: bool = False) -> None:
        super().__init__()
        self.reverses = reverses
        torch.manual_seed(0)
        self.name = name
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, VOCABULARY)
        self.times: list[float] = []

    def data(self) -> tuple[Tensor, ...]:
        tokens = torch.randint(VOCABULARY, (self.num_samples, LENGTH), generator=torch.Generator().manual_seed(1))
        if self.reverses:  # Each batch has the same samples in another order, so that sums are rounded in another way.
            tokens = tokens.view(-1, self.hparams.global_batch_size, LENGTH).flip(1).reshape(-1, LENGTH)
        return tokens, tokens.flip(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.embedding(tokens)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return functional.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        return makers([self.name.partition(":")[0]])[self.name](self)

    def on_train_start(self) -> None:
        self._change_mode("train")

    def on_train_end(self) -> None:
        self._change_mode("eval")

    def _change_mode(self, mode: str) -> None:
        optimizer = getattr(self.optimizers(), "optimizer", self.optimizers())
        if callable(change := getattr(optimizer, mode, None)):
            change()

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())


def train(
    name: str, strategy: str, width: int = WIDTH, num_steps: int = NUM_STEPS, reverses: bool = False
) -> tuple[Weights, list[float]]:
    """Train with the optimizer ``name``, and return the weights and the durations of the steps but the first ones."""
    warnings.simplefilter("ignore")
    model = Net(name, width, reverses)
    chosen = {} if strategy == "one process" else {"strategy": STRATEGIES[strategy]()}
    trainer = make_trainer("auto", max_steps=num_steps, precision="64-true", **chosen)
    trainer.fit(model)
    durations = [after - before for before, after in zip(model.times[2:], model.times[3:], strict=False)]
    return weights_of(model), durations


def train_all(names: list[str], strategy: str) -> dict[str, Weights | str]:
    """Train with each optimizer in one process, and return the weights, or the text of the error, by name."""
    found: dict[str, Weights | str] = {}
    for name in names:
        try:
            found[name] = train(name, strategy)[0]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
