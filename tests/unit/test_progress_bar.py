"""The progress bar shows the steps of the whole run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dist.plugins.callbacks import RunProgressBar, StepTelemetry


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Watched(RunProgressBar):
    """Record the bar after each batch: its description, the steps that are done, and the total."""

    def __init__(self) -> None:
        super().__init__(console_kwargs={"file": io.StringIO()})
        self.seen: list[tuple[str, float, float | None]] = []
        self.shown: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        bar = self.train_progress_bar
        self.seen.append((bar.description, bar.completed, bar.total))
        self.shown = self.get_metrics(trainer, pl_module)


def fit(folder: Path, ckpt_path: Path | None = None, **kwargs: Any) -> tuple[Watched, Trainer]:
    bar = Watched()
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[StepTelemetry(2), bar],
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        **kwargs,
    )
    trainer.fit(Module(), DataLoader(torch.ones(10, 4), batch_size=2), ckpt_path=ckpt_path)
    return bar, trainer


@pytest.mark.parametrize(
    ("kwargs", "steps", "total"),
    [
        ({"max_steps": 7, "max_epochs": -1}, [1, 2, 3, 4, 5, 6, 7], 7),
        ({"max_epochs": 2}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 10),
        ({"max_epochs": 1, "accumulate_grad_batches": 2}, [0, 1, 1, 2, 3], 3),
    ],
)
def test_the_bar_counts_the_steps_of_the_run(
    tmp_path: Path, kwargs: dict[str, Any], steps: list[int], total: int
) -> None:
    bar, _ = fit(tmp_path, **kwargs)
    assert [completed for _, completed, _ in bar.seen] == steps
    assert {seen_total for _, _, seen_total in bar.seen} == {total}
    assert [description.strip() for description, _, _ in bar.seen] == [
        f"Epoch {index // 5}, step" for index in range(len(steps))
    ]


def test_a_resumed_run_goes_on_from_its_step_and_rates_are_shown(tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, max_steps=3)
    trainer.save_checkpoint(tmp_path / "3.ckpt")
    bar, _ = fit(tmp_path, tmp_path / "3.ckpt", max_steps=8)
    assert [completed for _, completed, _ in bar.seen] == [4, 5, 6, 7, 8]
    assert bar.shown["samples/s"].replace(",", "").isdigit()
    assert bar.shown["mfu"].endswith("%")
