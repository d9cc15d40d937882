"""Test that blocks and tiles run again in the backward under every strategy, whatever form their parameters have."""

from __future__ import annotations

from array import array

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import (
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    MeshStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from tests.accelerator import place
from tests.pool import WorkerPool
from tests.thorough import one_in

WIDTH, TOKENS, BATCH, CLASSES, BLOCKS = 16, 6, 4, 20, 2


SEEN = array("i")
"""The number of tokens of each forward. Attributes of modules and global lists would not change in a rerun."""


class Counted(nn.Linear):
    """Note how many tokens each forward has."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.shape[-2])
        return super().forward(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Counted(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Scale the output of an MLP by a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.mlp(self.norm(x))


class Model(pl.LightningModule):
    """Predict classes of tokens by blocks and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.blocks = nn.Embedding(CLASSES, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.emb.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.emb(batch[0])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


MAKE = {
    "data_parallel": (2, DataParallelStrategy, {}),
    "full_shard": (2, FullShardStrategy, {}),
    "kept": (2, FullShardStrategy, {"reshard_after_forward": False}),
    "zero 1": (2, FullShardStrategy, {"zero_stage": 1}),
    "zero 2": (2, FullShardStrategy, {"zero_stage": 2}),
    "offload": (2, FullShardStrategy, {"offload": "both"}),
    "replicas": (4, HybridShardStrategy, {"dp_shard_size": 2, "dp_replicate_size": 2}),
    "tensor": (2, TensorParallelStrategy, {"tp_size": 2}),
    "pipeline": (2, PipelineParallelStrategy, {"pp_size": 2, "num_microbatches": 2}),
}


def count(name: str, precision: str, options: dict[str, object]) -> tuple[int, list[int]]:
    """Train, and return the number of this rank's blocks, and the tokens of each forward of MLPs in two steps."""
    _, make, arguments = MAKE[name]
    strategy: MeshStrategy = make(**arguments, **options)
    model = Model()
    loader = DataLoader(TensorDataset(torch.arange(8 * BATCH * TOKENS).view(-1, TOKENS) % CLASSES), batch_size=BATCH)
    trainer = pl.Trainer(
        **place(), strategy=strategy, max_steps=3, precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Restart()],
    )  # fmt: skip
    trainer.fit(model, loader)
    return sum(not block.scale.is_meta for block in model.blocks), list(SEEN)


class Restart(pl.Callback):
    """Count from the second step on, because the first one also tries and traces the model."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: object) -> None:
        if trainer.global_step == 1:
            del SEEN[:]


@pytest.mark.parametrize(
    ("name", "precision"), one_in(3, [(name, p) for p in ("32-true", "bf16-mixed") for name in MAKE])
)
def test_blocks_run_again(pool: WorkerPool, name: str, precision: str) -> None:
    num_steps = 2 * (2 if name == "pipeline" else 1)
    for num_blocks, seen in pool.run(count, MAKE[name][0], name, precision, {"activation_checkpointing": "full"}):
        assert num_blocks
        assert seen == [TOKENS] * (2 * num_steps * num_blocks)


@pytest.mark.parametrize(("name", "precision"), one_in(3, [(n, "bf16-mixed") for n in MAKE if n != "tensor"]))
def test_tiles_run_again(pool: WorkerPool, name: str, precision: str) -> None:
    num_steps = 2 * (2 if name == "pipeline" else 1)
    for num_blocks, seen in pool.run(count, MAKE[name][0], name, precision, {"tiled_mlp": 2, "tiled_loss": 2}):
        assert num_blocks
        assert seen == [2] * (2 * num_steps * num_blocks * TOKENS // 2)


class Moved(Model):
    """Change a weight between a forward and its backward."""

    def __init__(self, in_hook: bool, place: str) -> None:
        super().__init__()
        self.in_hook, self.place = in_hook, place

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.in_hook:
            self.move()
        return loss

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if self.in_hook:
            self.move()

    def move(self) -> None:
        with torch.no_grad():
            self.get_parameter(self.place).add_(1)


def move(name: str, in_hook: bool, options: dict[str, object]) -> str:
    """Train, and return the text of the error that ends the training."""
    _, make, arguments = MAKE[name]
    strategy: MeshStrategy = make(**arguments, **options)
    place_of_weight = "head.weight" if "tiled_loss" in options else "blocks.0.mlp.down.bias"
    loader = DataLoader(TensorDataset(torch.arange(8 * BATCH * TOKENS).view(-1, TOKENS) % CLASSES), batch_size=BATCH)
    trainer = pl.Trainer(
        **place(), strategy=strategy, max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Moved(in_hook, place_of_weight), loader)
    except RuntimeError as error:
        return str(error)
    return ""


CHANGED = [
    (name, in_hook, option)
    for name in MAKE
    if name not in ("tensor", "pipeline")
    for in_hook in (False, True)
    for option in ("activation_checkpointing", "tiled_mlp", "tiled_loss")
]


@pytest.mark.parametrize(("name", "in_hook", "option"), one_in(6, CHANGED))
def test_a_weight_that_changes_before_the_backward_is_an_error(
    pool: WorkerPool, name: str, in_hook: bool, option: str
) -> None:
    value: object = "full" if option == "activation_checkpointing" else 3
    for message in pool.run(move, MAKE[name][0], name, in_hook, {option: value}):
        assert f"{option}: the parameter" in message or "modified by an inplace operation" in message
