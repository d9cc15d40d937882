"""Train a family on the ranks of a strategy or in one process, and return the values that are compared."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import DataLoader

import lightning_dist
import lightning_dist.plugins
from lightning_dist import (
    ContextParallelStrategy,
    FullShardStrategy,
    NDParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_dist.run.parity import whole_gradients, whole_parameters
from tests.zoo.families import FAMILIES
from tests.zoo.family import BATCH_SIZE, Batch, Family
from tests.zoo.float64 import float64_throughout

__all__ = ["CRASHED", "REFUSED", "STRATEGIES", "WORLD_SIZES", "Outcome", "run"]

REFUSED, CRASHED = "refused at start", "crashed"
"""Possible beginnings of the text of a :class:`FitError`."""

PACKAGE = tuple(Path(module.__path__[0]).resolve() for module in (lightning_dist, lightning_dist.plugins))

NUM_STEPS = 2
NUM_PARTS = 2
"""Number of parts of a global batch: each part is for one of two ranks, microbatches, or accumulated batches."""

STRATEGIES = {
    "full_shard": lambda: FullShardStrategy(),
    "tensor_parallel": lambda: TensorParallelStrategy(2, strict_plan=False),
    "pipeline_parallel": lambda: PipelineParallelStrategy(2, num_microbatches=NUM_PARTS),
    "nd_parallel": lambda: NDParallelStrategy(pp_size=2, tp_size=2, num_microbatches=NUM_PARTS, strict_plan=False),
    "context_parallel": lambda: ContextParallelStrategy(2),
}
WORLD_SIZES = {
    "full_shard": 2,
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "nd_parallel": 4,
    "context_parallel": 2,
}
_PIPELINES = ("pipeline_parallel", "nd_parallel")


@dataclass
class Outcome:
    """Hold the results of a run.

    Args:
        losses: Loss of each step on this rank's part of the data.
        gradients: Whole gradients in the first step, by the parameters' full names; empty except on rank 0.
        weights: Whole parameters after the last step, by full name; empty except on rank 0.
        split: Fraction of the parameters that is split over ``tp``; 0 except on rank 0.
    """

    losses: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    split: float


class FitError(Exception):
    """Report the error of a fit by its text alone, because not every exception can be sent to another process.

    Args:
        error: Error that the fit raised.
        is_at_start: Whether the error was raised before the first step had finished. Such an error counts as a refusal
            if a ``raise`` statement of lightning-dist raised it; any other error counts as a crash.
    """

    def __init__(self, error: Exception, is_at_start: bool) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        file = Path(where.filename).resolve()
        by_package = any(map(file.is_relative_to, PACKAGE)) and (where.line or "").startswith("raise")
        kind = REFUSED if is_at_start and by_package else CRASHED
        super().__init__(f"{kind}: {type(error).__name__}: {error}")


class ZooModule(pl.LightningModule):
    """Train a Hugging Face model, as a user would.

    Args:
        family: Family of the model.
        seed: Seed of the model's weights.
        is_joined: Whether one batch has all parts of a global batch; otherwise each part is a batch.
    """

    def __init__(self, family: Family, seed: int, is_joined: bool) -> None:
        super().__init__()
        self.family = family
        self.is_joined = is_joined
        self.model = family.build(seed)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with float64_throughout():
            return self.model(**batch, **self.family.options).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        parts = [self.family.batch(generator) for _ in range(NUM_STEPS * NUM_PARTS)]
        kwargs = getattr(self.trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        parts = parts[kwargs["rank"] :: kwargs["num_replicas"]]
        if self.is_joined:
            parts = [_joined(parts[i : i + NUM_PARTS]) for i in range(0, len(parts), NUM_PARTS)]
        return DataLoader(parts, batch_size=None)


class PackedModule(ZooModule):
    """Train a model whose batches have tensors with several rows for each sample."""

    def split_batch(self, batch: Batch, num_microbatches: int) -> list[Batch]:
        """Split a batch into microbatches, with as many rows of each tensor as their samples have."""
        rows = {key: BATCH_SIZE * self.family.packed.get(key, 1) for key in batch}
        return [
            {key: value[index * rows[key] : (index + 1) * rows[key]] for key, value in batch.items()}
            for index in range(num_microbatches)
        ]


class Recorder(pl.Callback):
    """Record the whole gradients of the first step, and the loss of each batch."""

    def __init__(self) -> None:
        self.gradients: dict[str, np.ndarray] = {}
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if not trainer.global_step:
            self.gradients = {name: grad.numpy() for name, grad in whole_gradients(pl_module).items()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, out: Any, *args: Any) -> None:
        # Lightning divides the loss by the number of accumulated batches.
        self.losses.append(float(out["loss"]) * trainer.accumulate_grad_batches)


def run(name: str, strategy: str | None) -> Outcome:
    """Train a family for a few steps on this rank.

    Args:
        name: Name of the family.
        strategy: Key of :data:`STRATEGIES`; None: Lightning's own strategy for one process.
    """
    for logger in ("lightning.pytorch", "transformers"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    is_joined = strategy in _PIPELINES
    # Every rank draws different weights, since the strategy must broadcast those of rank 0.
    cls = PackedModule if FAMILIES[name].packed else ZooModule
    module = cls(FAMILIES[name], seed=int(os.environ["RANK"]), is_joined=is_joined)
    recorder = Recorder()
    accumulate = 1 if is_joined or strategy == "full_shard" else NUM_PARTS
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZES[strategy] if strategy else 1,
        strategy=STRATEGIES[strategy]() if strategy else "auto",
        precision="64-true",
        max_steps=NUM_STEPS,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module)
    except Exception as error:
        raise FitError(error, is_at_start=not recorder.losses) from error
    weights = {name: weight.numpy() for name, weight in whole_parameters(module).items()}
    losses = [float(np.mean(part)) for part in np.split(np.array(recorder.losses), NUM_STEPS)]
    split = _split_fraction(module)
    return Outcome(losses, recorder.gradients, weights, split) if trainer.is_global_zero else Outcome(losses, {}, {}, 0)


def _joined(parts: list[Batch]) -> Batch:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _split_fraction(module: pl.LightningModule) -> float:
    split = sum(param.numel() for param in module.parameters() if any(_is_split_over_tp(param)))
    return split / sum(param.numel() for param in module.parameters())


def _is_split_over_tp(param: Tensor) -> Iterator[bool]:
    if isinstance(param, DTensor) and "tp" in (param.device_mesh.mesh_dim_names or ()):
        yield not isinstance(param.placements[param.device_mesh.mesh_dim_names.index("tp")], Replicate)
