"""The number of accumulated batches changes between steps of Lightning's loops, where the loops know only one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist.plugins import _compat
from lightning_dist.plugins._compat.progress import training_progress
from lightning_dist.plugins.strategies.steps.base import begins_accumulation


class Recorded(pl.LightningModule):
    """Write after which batches the optimizer steps, with which gradient, and how the loops count meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.steps: list[tuple[int, int, float]] = []
        self.zeroed: list[int] = []
        self.counts: list[tuple[bool, int]] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.counts.append((begins_accumulation(self.trainer), training_progress(self.trainer).in_window))
        return (self.weight * batch).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.steps.append((self.current_epoch, self.trainer.fit_loop.batch_idx, self.weight.grad.item()))

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        number = copy.deepcopy(self.trainer.accumulate_grad_batches)
        assert (number, index % number) == (
            self.trainer.accumulate_grad_batches,
            index % self.trainer.accumulate_grad_batches,
        )

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zeroed.append(batch_idx)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def approx(steps: list[tuple[int, int, float]]) -> list[Any]:
    return [(epoch, batch, pytest.approx(gradient, rel=1e-12)) for epoch, batch, gradient in steps]


def _fit(folder: Path, numbers: list[int], num_batches: int, epochs: int = 1) -> tuple[Recorded, pl.Trainer]:
    module, left = Recorded(), iter(numbers)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    undo = _compat.change_accumulation(trainer, lambda: next(left))
    trainer.fit(module, DataLoader(torch.arange(1, num_batches + 1, dtype=torch.float64), 1))
    assert _compat.configured_accumulation(trainer) == 2
    undo()
    return module, trainer


def test_each_step_accumulates_as_many_batches_as_were_chosen_for_it(tmp_path: Path) -> None:
    module, trainer = _fit(tmp_path, [2, 3, 1, 2], 8)
    assert module.steps == approx([(0, 1, 3 / 2), (0, 4, 12 / 3), (0, 5, 6.0), (0, 7, 15 / 2)])
    assert module.zeroed == [0, 2, 5, 6]
    firsts = [True, False, True, False, False, True, True, False]
    assert module.counts == list(zip(firsts, [0, 1, 0, 1, 2, 0, 0, 1], strict=True))
    assert trainer.accumulate_grad_batches == 2 and trainer.global_step == 4


def test_the_end_of_an_epoch_ends_a_step(tmp_path: Path) -> None:
    module, _ = _fit(tmp_path, [3, 3, 2, 2], 4, epochs=2)
    assert module.steps == approx([(0, 2, 6 / 3), (0, 3, 4 / 3), (1, 1, 3 / 2), (1, 3, 7 / 2)])


def test_the_first_batch_of_an_epoch_begins_a_step_after_one_that_was_cut_off_in_its_first(tmp_path: Path) -> None:
    module, _ = _fit(tmp_path, [3, 3], 1, epochs=2)
    assert module.steps == approx([(0, 0, 1 / 3), (1, 0, 1 / 3)])
