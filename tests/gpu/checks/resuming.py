"""Save a checkpoint on one layout, and resume it on the same and on others."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist.run.parity import whole_parameters
from tests.accelerator import place
from tests.gpu.check import Found
from tests.gpu.checks.parity import worst_error
from tests.gpu.ranks import Ranks
from tests.models import build
from tests.parity.run import Case, make_strategy

__all__ = ["save_and_resume"]

STEPS = 4
"""Number of steps after which a checkpoint is saved, and that are then trained once more."""


def train(layout: str, folder: Path, ckpt_path: str | None = None) -> dict[str, np.ndarray]:
    """Train with AdamW to twice ``STEPS``, saving in the middle, and return the weights."""
    torch.manual_seed(0)
    model = build("gpt", optimizer="adamw")
    trainer = pl.Trainer(
        **place(),
        strategy=make_strategy(Case(layout, "gpt", 1, None)),
        precision="64-true",
        max_epochs=2,
        limit_train_batches=STEPS,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=ckpt_path, weights_only=False)
    return {name: weight.numpy() for name, weight in whole_parameters(model).items()}


def save_and_resume(ranks: Ranks, num_ranks: int, layout: str, others: tuple[tuple[int, str], ...]) -> Found:
    """Compare resumed runs with the uninterrupted one.

    Args:
        ranks: The ranks of the check.
        num_ranks: Number of ranks that save.
        layout: Their layout, with which a resumed run must have the same bits.
        others: Numbers of ranks and layouts that resume as well, where sums are rounded in another order.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpu-kit-"))
    try:
        whole = ranks.run(train, num_ranks, layout, folder / "whole")[0]
        path = str(folder / "whole" / f"step={STEPS}.ckpt")
        details, worst = [], 0.0
        for index, (number, other) in enumerate(((num_ranks, layout), *others)):
            resumed = ranks.run(train, number, other, folder / str(index), path)[0]
            error, name = worst_error(resumed, whole)
            worst = max(worst, error)
            if error > (1e-8 if index else 0.0):
                details.append(f"resumed on {number} ranks as {other}: {name} has a relative error of {error:.1e}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Found(f"largest relative error {worst:.0e}", not details, tuple(details))
