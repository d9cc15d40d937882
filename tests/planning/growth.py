"""Measure by how much the processes of real ranks grow in a training, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from tests.planning.cases import Case
from tests.planning.measured import fit

__all__ = ["ENVIRONMENT", "measure_growth"]

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2", "MALLOC_PERTURB_": "1"}
"""Variables with which glibc returns freed memory at once, and writes to new memory, so that the kernel counts it."""


class _HighWater(Callback):
    """Measure the most memory of the process from its second optimizer step on."""

    def __init__(self, accumulated: int) -> None:
        self._accumulated = accumulated
        self._num_batches = 0
        self.peak = 0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._num_batches == self._accumulated:
            Path("/proc/self/clear_refs").write_text("5")  # The mark of the most memory begins again.

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._num_batches += 1
        if self._num_batches == 2 * self._accumulated:
            self.peak = _status("VmHWM")


def measure_growth(case: Case) -> int:
    """Train two optimizer steps twice on this rank, and return the bytes that the process has grown by in the second.

    The first training loads libraries and makes the threads and buffers of process groups. This is a collective over
    all processes.
    """
    torch.set_num_threads(1)
    accumulated = case.trainer.get("accumulate_grad_batches", 1)
    fit(case, _HighWater(accumulated))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, callback = _status("VmRSS"), _HighWater(accumulated)
    fit(case, callback)
    return callback.peak - before


def _status(name: str) -> int:
    """Return a number of bytes from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(value) * 1024
