"""List the lines at which the host waits for the device in steady training steps."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dist import (
    ContextParallelStrategy,
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from tests.bench.sides import MixtureGPT, UnloggedGPT, make_loader, make_module, make_trainer
from tests.bench.workload import Workload
from tests.gpu.check import Found
from tests.gpu.checks.sizes import workload
from tests.gpu.ranks import Ranks

__all__ = ["STRATEGIES", "SynchronizingLines", "synchronizations"]

STEPS = range(5, 9)
"""The steps that are watched; nothing is logged in them."""

STRATEGIES: dict[str, tuple[Any, type]] = {
    "data_parallel": (DataParallelStrategy, UnloggedGPT),
    "full_shard": (FullShardStrategy, UnloggedGPT),
    "full_shard-offload-optimizer": (partial(FullShardStrategy, offload="optimizer"), UnloggedGPT),
    "full_shard-checkpointing-offload": (partial(FullShardStrategy, activation_checkpointing="offload"), UnloggedGPT),
    "hybrid_shard": (partial(HybridShardStrategy, 1, 2), UnloggedGPT),
    "tensor_parallel": (partial(TensorParallelStrategy, 2), UnloggedGPT),
    "context_parallel": (partial(ContextParallelStrategy, 2), UnloggedGPT),
    "pipeline_parallel": (partial(PipelineParallelStrategy, 2, num_microbatches=2), UnloggedGPT),
    "expert_parallel": (partial(FullShardStrategy, ep_size=2), MixtureGPT),
}
"""Strategies and modules, by the names of checks."""

ROOT = Path(__file__).parents[3]


class SynchronizingLines:
    """Count the warnings about synchronization by the line of this repository from which they come.

    torch reports those of a backward when it ends, so that they come from the line that has called it.
    """

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._context = warnings.catch_warnings()

    def begin(self) -> None:
        """Begin to count."""
        self._context.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._record

    def end(self) -> None:
        """Stop counting, and show warnings as before."""
        self._context.__exit__(None, None, None)

    def _record(self, message: Any, category: Any, filename: str, lineno: int, *args: Any) -> None:
        if "synchroniz" not in str(message):
            return
        stack = [frame for frame in traceback.extract_stack()[:-1] if "warnings.py" not in frame.filename]
        own = [frame for frame in stack if self._is_own(frame.filename)]
        frame = own[-1] if own else stack[-1]
        path = Path(frame.filename)
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-3:])
        self.lines[f"{name}:{frame.lineno}  {frame.line}"] += 1

    @staticmethod
    def _is_own(filename: str) -> bool:
        path = Path(filename)
        return path.is_relative_to(ROOT) and ".venv" not in path.parts and "tests" not in path.parts


class Watch(Callback):
    """Count in ``STEPS``."""

    def __init__(self) -> None:
        self.lines = SynchronizingLines()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, index: int) -> None:
        if index == STEPS.start:
            self.lines.begin()
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
        if index == STEPS.stop:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
            self.lines.end()


def train(name: str, size: Workload) -> Counter[str]:
    """Train until the watched steps are over, and return the lines."""
    strategy, cls = STRATEGIES[name]
    watch = Watch()
    trainer = make_trainer(strategy(), size, watch, max_steps=STEPS.stop + 1, precision="bf16-mixed")
    trainer.fit(make_module(cls, size), make_loader(trainer, size))
    return watch.lines.lines


def synchronizations(ranks: Ranks, num_ranks: int, name: str) -> Found:
    """List the lines of a strategy of :data:`STRATEGIES` on the first rank; there is no bound."""
    lines = ranks.run(train, num_ranks, name, workload(ranks.machine, "124M", batch_divisor=4))[0]
    details = tuple(f"{number / len(STEPS):>6.2f} per step  {line}" for line, number in lines.most_common())
    return Found(
        f"{len(lines)} lines wait for the device, {lines.total() / len(STEPS):g} times per step", True, details
    )
