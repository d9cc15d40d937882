"""Compare step times with and without replicas that may leave and join (``python -m tests.elastic.step_time``)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader

from examples.gpt.model import GPTModule
from tests.bench.harness import median_interval
from tests.bench.workload import Workload

_WARM_UP = 10
"""Number of steps that are not measured."""

_CONFIGURATION = """\
seed_everything: 1
model:
  class_path: tests.elastic.step_time.Timed
  init_args: {{file: {file}}}
trainer:
  accelerator: cpu
  devices: {devices}
  strategy: data_parallel
  max_steps: {max_steps}
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""


class Timed(GPTModule):
    """Train the examples' GPT, and write the time of each step of the first rank.

    Args:
        file: The file to write.
    """

    def __init__(self, file: str) -> None:
        workload = Workload()
        super().__init__(**workload.model)
        self.file, self.ends = file, list[float]()

    def configure_optimizers(self) -> AdamW:
        """Return AdamW; the hyperparameters that the command knows are those of this class."""
        return AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs: Tensor, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.perf_counter())

    def on_train_end(self) -> None:
        replica = os.environ.get("LIGHTNING_DIST_REPLICA", "0")
        if self.global_rank == 0 and replica == "0":
            ends = self.ends[_WARM_UP:]
            steps = [after - before for before, after in pairwise(ends)]
            Path(self.file).write_text(json.dumps(steps))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Workload().windows(), Workload().global_batch_size // 2, drop_last=True)


def step_s(elastic: bool, folder: Path, num_steps: int) -> float:
    """Train with two ranks, which are two replicas if ``elastic``, and return the median time of a step in seconds."""
    folder.mkdir(parents=True)
    file, configuration = folder / "steps.json", folder / "my.yaml"
    configuration.write_text(
        _CONFIGURATION.format(file=file, devices=1 if elastic else 2, max_steps=num_steps + _WARM_UP + 1)
    )
    words = ["--devices=1", "--elastic=2:2"] if elastic else ["--devices=2"]
    words = ["launch", *words, f"--logs={folder / 'logs'}", "--", "fit", "-c", str(configuration)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "lightning_dist.cli", *words], capture_output=True, text=True, env=environment
    )
    if ran.returncode:
        raise RuntimeError(f"launch ended with exit code {ran.returncode}:\n{ran.stderr[-3000:]}")
    return median(json.loads(file.read_text()))


def main() -> int:
    """Measure pairs in turn, print the ratios, and return 1 if their median is above the bound, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.elastic.step_time", description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each run")
    parser.add_argument("--bound", type=float, default=1.05, help="largest ratio")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-step-time-"))
    print(f"torch {torch.__version__}, lightning {pl.__version__}, data_parallel, 2 ranks, {Workload()}")
    ratios = []
    for index in range(options.pairs):
        order = (True, False) if index % 2 else (False, True)
        times = {elastic: step_s(elastic, folder / f"{index}_{elastic}", options.steps) for elastic in order}
        ratios.append(times[True] / times[False])
        print(f"{times[True] * 1e3:7.1f} ms / {times[False] * 1e3:7.1f} ms = {ratios[-1]:.3f}", flush=True)
    interval = median_interval(ratios)
    within = "" if interval is None else f", 95% interval {interval[0]:.3f} to {interval[1]:.3f}"
    print(f"with elastic / without: {median(ratios):.3f} (median of {len(ratios)}{within}; bound {options.bound:g})")
    return int(median(ratios) > options.bound)


if __name__ == "__main__":
    sys.exit(main())
