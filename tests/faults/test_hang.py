"""Test that a rank that hangs in a real run is found and named, and the run is ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lightning_dist.run.watchdog import EXIT_HANG
from tests.launched import launch

pytestmark = pytest.mark.alone

SCRIPT = """
import sys, time
import lightning.pytorch as pl
from lightning_dist.plugins.callbacks import FaultTolerance
from lightning_dist.plugins.loggers import MLflowLogger
from tests.models import GPT

class Ready(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        time.sleep(0.01)
        if trainer.global_step == 2:
            print("READY", trainer.global_rank, flush=True)

folder = sys.argv[1]
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="full_shard", max_steps=100000, enable_progress_bar=False, max_epochs=-1,
    enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False, default_root_dir=folder,
    enable_checkpointing=False, callbacks=[Ready(), FaultTolerance(hang_timeout=3)],
    logger=MLflowLogger(tracking_uri="sqlite:///" + folder + "/mlflow.db", save_dir=folder),
)
trainer.fit(GPT())
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_stopped_rank_is_named_and_the_run_ends(mlflow_folder: Path) -> None:
    process, last = launch(SCRIPT, mlflow_folder, forked=True)
    os.kill(last, signal.SIGSTOP)
    start = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode == EXIT_HANG, output
    assert "rank 1 hangs: it is stopped (SIGSTOP)" in output
    first = next(line for line in output.splitlines() if line.startswith("lightning-dist: "))
    assert "rank 0 waits in" in first and "background" not in first
    deadline = time.monotonic() + 10  # The watchdog kills ranks that do not respond after the others have exited.
    while is_running(last):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    names = {path.name for path in mlflow_folder.rglob("artifacts/watchdog/*")}
    assert {"watchdog.txt", "stacks-rank0.txt", "flight_recorder-rank0.json"} <= names
