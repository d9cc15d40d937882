"""Compare the validation loss of the examples' GPT after training with compressed gradients or with local steps.

All ways of training see the same batches, begin from the same weights and take the same number of steps. The training
is that of ``make demo``: 200 steps of 16 x 128 bytes, here by 2 replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

# Each rank has one core. torch reads this variable when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from examples.gpt.data import TextDataModule
from examples.gpt.model import GPTModule
from lightning_dist import DataParallelStrategy
from lightning_dist.techniques.compression import BF16, FP8, DiLoCo, Int8, LocalSGD, PowerSGD, TopK
from tests.pool import WorkerPool

NUM_RANKS, NUM_STEPS, VALIDATE_EVERY = 2, 200, 20

WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "exact": dict,
    "bf16": lambda: {"compression": BF16()},
    "int8": lambda: {"compression": Int8()},
    "int8, no feedback": lambda: {"compression": Int8(error_feedback=False)},
    "fp8": lambda: {"compression": FP8()},
    "powersgd 16, from 40": lambda: {"compression": PowerSGD(16, start_step=40)},
    "powersgd 4, from 40": lambda: {"compression": PowerSGD(4, start_step=40)},
    "powersgd 4, from 150": lambda: {"compression": PowerSGD(4, start_step=150)},
    "powersgd 4, from 40, no feedback": lambda: {
        "compression": PowerSGD(4, start_step=40, error_feedback=False),
    },
    "topk 5%, from 40": lambda: {"compression": TopK(0.05, start_step=40)},
    "topk 5%, from 150": lambda: {"compression": TopK(0.05, start_step=150)},
    "topk 5%, from 40, no feedback": lambda: {"compression": TopK(0.05, start_step=40, error_feedback=False)},
    "topk 1%, from 40": lambda: {"compression": TopK(0.01, start_step=40)},
    "topk 1%, from 150": lambda: {"compression": TopK(0.01, start_step=150)},
    "topk 1%, from 40, no feedback": lambda: {"compression": TopK(0.01, start_step=40, error_feedback=False)},
    "LocalSGD 20": lambda: {"sync": LocalSGD(20)},
    "DiLoCo 20": lambda: {"sync": DiLoCo(20)},
    "DiLoCo 20, from 100, momentum 0.5": lambda: {"sync": DiLoCo(20, outer_momentum=0.5, start_step=100)},
    "DiLoCo 20, int8": lambda: {"sync": DiLoCo(20, compression=Int8())},
}
"""Arguments of the strategy by the names of the ways of training."""

BOUNDS = {
    "bf16": 0.5,
    "int8": 0.5,
    "powersgd 4, from 40": 2.5,
    "powersgd 4, from 150": 2.5,
    "topk 5%, from 40": 2.5,
    "topk 5%, from 150": 2.5,
    "topk 1%, from 40": 5.0,
    "topk 1%, from 150": 5.0,
    "DiLoCo 20": 3.0,
    "DiLoCo 20, from 100, momentum 0.5": 3.0,
}
"""The largest accepted increase of the final validation loss, in percent of that of ``exact``."""


class Losses(Callback):
    """Record the validation losses by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the loss."""
        self.by_step[trainer.global_step] = float(trainer.callback_metrics["val/loss"])


def train(way: str, seed: int, num_steps: int) -> dict[int, float]:
    """Train, and return the validation losses by step."""
    torch.manual_seed(seed)
    module = GPTModule(warmup_steps=30)
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=DataParallelStrategy(**WAYS[way]()),
        max_steps=num_steps,
        gradient_clip_val=1.0,
        val_check_interval=VALIDATE_EVERY,
        check_val_every_n_epoch=None,
        limit_val_batches=20,
        num_sanity_val_steps=0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, TextDataModule(context=128, global_batch_size=16))
    return losses.by_step


def steps_until(target: float, by_step: Mapping[str, float] | Mapping[int, float]) -> float | None:
    """Return the number of steps after which a validation loss was at most ``target``; None if it never was.

    Args:
        target: The loss.
        by_step: Validation losses by step, between which the loss is interpolated.
    """
    before: tuple[float, float] | None = None
    for step, loss in sorted((int(step), loss) for step, loss in by_step.items()):
        if loss <= target:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = step, loss
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Train by all chosen ways and seeds, print a table, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser("python -m tests.bench.convergence", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all losses to this file")
    options = parser.parse_args(argv)
    ways = ["exact", *(way for way in options.ways if way != "exact")]
    losses: dict[str, list[dict[int, float]]] = {}
    pool = WorkerPool()
    try:
        for way in ways:
            for seed in options.seeds:
                start = time.monotonic()
                losses.setdefault(way, []).append(
                    pool.run(train, NUM_RANKS, way, seed, options.steps, timeout_s=900)[0]
                )
                final = list(losses[way][-1].values())[-1]
                print(f"{way:<34} seed {seed}: {final:.4f} ({time.monotonic() - start:.0f} s)", flush=True)
    finally:
        pool.close()
    finals = {way: [list(by_step.values())[-1] for by_step in runs] for way, runs in losses.items()}
    print(f"\n{'way':<34}{'loss':>8}{'against exact':>16}{'of each seed':>30}{'bound':>8}")
    failed = False
    for way in ways:
        changes = [100 * (loss / exact - 1) for loss, exact in zip(finals[way], finals["exact"], strict=True)]
        bound = BOUNDS.get(way)
        is_met = bound is None or fmean(changes) <= bound
        failed |= not is_met
        each = " ".join(f"{change:+.2f}%" for change in changes)
        shown = "" if bound is None else f"{bound}%" + ("" if is_met else ", NOT MET")
        print(f"{way:<34}{fmean(finals[way]):>8.4f}{fmean(changes):>+15.2f}%{each:>30}{shown:>8}")
    if options.json:
        options.json.write_text(json.dumps(losses, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
