"""Test that updates inside the backward are those of one process, and what cannot work with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import MeshPrecision
from tests.behaviour.models import Classifier, samples
from tests.distributed.fit import Weights, assert_same, make_strategy, make_trainer, weights_of
from tests.models import build
from tests.pool import RankFailed, WorkerPool


class Block(nn.Module):
    """Use the second layer on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.second(x) if uses_second else x


class Skips(pl.LightningModule):
    """Use a layer of two blocks on rank 0 only, and the last block on no rank."""

    def __init__(self, uses_late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.uses_late = uses_late

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        late = self.blocks[0].first.weight if self.uses_late else None
        x = batch[0].double()
        for block in self.blocks[:2]:
            x = block(x, self.global_rank == 0)
        return x.square().mean() + (0 if late is None else late.square().sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=2)


class Gradients(pl.Callback):
    """Count the gradients that are left at the end of each batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        with torch.DisableTorchFunction():  # A hook may not read gradients that were freed.
            self.counts.append(sum(param.grad is not None for param in pl_module.parameters()))


def fit(layout: str, steps_early: bool, model: str = "gpt", **kwargs: Any) -> tuple[Weights, list[int]]:
    strategy = layout
    if layout != "auto":
        strategy = make_strategy(layout, step_in_backward=steps_early, **kwargs.pop("strategy_kwargs", {}))
    counter = Gradients()
    kwargs = {"max_steps": 4, "precision": "64-true", "callbacks": [counter], **kwargs}
    module = build("gpt", optimizer="adamw") if model == "gpt" else Skips(uses_late=model == "late")
    make_trainer("auto", strategy=strategy, **kwargs).fit(module)
    return weights_of(module), counter.counts


@pytest.mark.parametrize(("layout", "offloads"), [("full_shard", False), ("2x2", False), ("full_shard", True)])
def test_weights_are_those_of_one_process(pool: WorkerPool, tmp_path: Path, layout: str, offloads: bool) -> None:
    expected, counts = pool.run(fit, 1, "auto", False)[0]
    assert min(counts) > 20
    offload = {"offload": "both", "offload_folder": str(tmp_path)} if offloads else {}
    for weights, counts in pool.run(fit, 4, layout, True, strategy_kwargs=offload):
        assert_same(weights, expected)
        assert max(counts) <= 1  # Scalars are replicated, and updated at the end.


def test_parameters_that_are_not_used_are_updated_like_without_it(pool: WorkerPool) -> None:
    expected = pool.run(fit, 4, "full_shard", False, "skips")[0][0]
    actual = pool.run(fit, 4, "full_shard", True, "skips")[0][0]
    assert_same(actual, expected)
    initial = {name: param.detach().double().numpy() for name, param in Skips().named_parameters()}
    assert_same({"unused": actual["blocks.2.first.weight"]}, {"unused": initial["blocks.2.first.weight"]})


def test_a_gradient_that_comes_late_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed, match="was computed after the parameter had been updated"):
        pool.run(fit, 4, "full_shard", True, "late")


class Clips(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("layout", "kwargs", "text"),
    [
        ("2x1", {}, "nothing is sharded"),
        ("full_shard", {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0: the norm needs all gradients"),
        ("full_shard", {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ("full_shard", {"precision": None, "plugins": {"param_dtype": "float16"}}, "with a loss scale"),
        (
            "full_shard",
            {"precision": None, "plugins": {"master_weights": "kahan"}},
            "MeshPrecision with master weights",
        ),
        ("full_shard", {"callbacks": [Clips()]}, "Clips.on_before_optimizer_step, which would see"),
    ],
)
def test_what_needs_all_gradients_is_refused(pool: WorkerPool, layout: str, kwargs: Any, text: str) -> None:
    with pytest.raises(RankFailed, match=text):
        pool.run(refused, 2, layout, kwargs)


def refused(layout: str, kwargs: dict[str, Any]) -> None:
    if "plugins" in kwargs:
        kwargs = {**kwargs, "plugins": [MeshPrecision(**kwargs["plugins"])]}
    fit(layout, True, **kwargs)


class Weighs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "weight": 1 + batch_idx}


def refused_weight() -> None:
    trainer = make_trainer("full_shard", {"step_in_backward": True}, max_steps=1, precision="64-true")
    trainer.fit(Weighs(), DataLoader(samples(8), 4))


def test_losses_with_weights_are_refused(pool: WorkerPool) -> None:
    text = r"step_in_backward=True with a training_step that returns \{'loss': ..., 'weight': ...\}"
    with pytest.raises(RankFailed, match=text):
        pool.run(refused_weight, 2)
