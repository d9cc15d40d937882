"""Measure the seconds from the command to the end of the first step, by their parts, for each strategy.

Run as ``python -m tests.bench.startup``. The model, its data and the configuration are those of the demo, without
loggers and checkpoints. Each round starts every strategy once, in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer

BOUND_S = 0.5
"""Longest time by which the start of a strategy may be longer than that of ``ddp``."""

WAYS = (
    "ddp",
    "data_parallel",
    "full_shard",
    "hybrid_shard",
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
)
PARTS = ("imports and configuration", "other processes", "model, plans and optimizers", "first step")
_OPTIONS = (
    "--trainer.devices=2",
    "--trainer.max_steps=1",
    "--trainer.limit_val_batches=0",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
)


class Marks(Callback):
    """Write the times of day at which the parts of a start end on the first rank.

    Args:
        file: The file to write.
    """

    def __init__(self, file: str) -> None:
        self.file, self.times = file, [time.time()]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Mark that all processes communicate."""
        self.times.append(time.time())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark that the module is parallel and its optimizers exist."""
        self.times.append(time.time())

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Mark the end of the first step, and write all marks with the processor time of this process."""
        self.times.append(time.time())
        if trainer.global_rank == 0:
            used = psutil.Process().cpu_times()
            Path(self.file).write_text(json.dumps({"times": self.times, "cpu": used.user + used.system}))


def start(way: str, folder: Path) -> dict[str, float]:
    """Start a training, and return the seconds of the parts of its start, their sum, and the processor time of rank 0.

    Args:
        way: Name of the strategy.
        folder: Folder for the marks.

    Raises:
        RuntimeError: If the training fails.
    """
    file, configuration = folder / "marks.json", folder / "marks.yaml"
    file.unlink(missing_ok=True)
    configuration.write_text(
        f"trainer:\n  callbacks:\n    - class_path: tests.bench.startup.Marks\n      init_args: {{file: {file}}}\n"
    )
    files = ["-c", "examples/gpt/base.yaml", "-c", str(configuration)]
    command = [sys.executable, "-m", "lightning_dist.cli", "fit", *files, f"--trainer.strategy={way}", *_OPTIONS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.time()
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode or not file.exists():
        raise RuntimeError(f"{way} ended with exit code {ran.returncode}:\n{ran.stderr[-3000:]}")
    marks = json.loads(file.read_text())
    ends = [begin, *marks["times"]]
    parts = {name: ends[index + 1] - ends[index] for index, name in enumerate(PARTS)}
    return {**parts, "sum": ends[len(PARTS)] - begin, "processor": marks["cpu"]}


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the table of medians, with the differences from ``ddp`` in the same rounds."""
    lines = [
        f"| strategy | {' | '.join(PARTS)} | sum | longer than `ddp` | smallest to largest | processor time |",
        f"|---|{'---|' * (len(PARTS) + 4)}",
    ]
    for way, runs in found.items():
        cells = [f"{median(run[name] for run in runs):.2f}" for name in (*PARTS, "sum")]
        longer = _longer(found, way)
        spread = f"{min(longer):+.2f} to {max(longer):+.2f}"
        cells += [f"{median(longer):+.2f}", spread] if way != "ddp" else ["", ""]
        cells.append(f"{median(run['processor'] for run in runs):.2f}")
        lines.append(f"| `{way}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _longer(found: Mapping[str, Sequence[Mapping[str, float]]], way: str) -> list[float]:
    return [own["sum"] - ddp["sum"] for own, ddp in zip(found[way], found["ddp"], strict=True)]


def main() -> int:
    """Measure, print the table, and return 1 if a strategy starts later than the bound allows, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    chosen = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        start("ddp", Path(name))  # Files are in memory after it.
        for index in range(options.rounds):
            for way in chosen.sample(WAYS, len(WAYS)):
                found[way].append(start(way, Path(name)))
            print(f"round {index + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(table(found))
    late = [way for way in WAYS if median(_longer(found, way)) > BOUND_S]
    print(f"later than ddp by more than {BOUND_S} s: {', '.join(late) or 'none'}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
