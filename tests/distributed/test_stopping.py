"""Test that runs that are stopped by a signal save, exit with a certain code, and resume without any difference."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist.checkpoint import find
from lightning_dist.mesh.preemption import EXIT_STOPPED, TrainingStopped
from lightning_dist.plugins.callbacks import FaultTolerance
from lightning_dist.plugins.strategies import launcher, run_checkpoints
from tests.distributed.test_exact_resume import Regression, fit
from tests.distributed.test_saving import Slow
from tests.launched import launch
from tests.pool import WorkerPool
from tests.thorough import one_in


class Signal(pl.Callback):
    """Send a signal to this process in batch 6.

    Args:
        where: Part of the batch in which the signal is sent: ``"step"``, ``"save"`` or ``"validation"``.
        ranks: Ranks that send the signal.
        number: Number of the signal.
    """

    def __init__(self, where: str, ranks: list[int], number: int = signal.SIGTERM) -> None:
        self.where, self.ranks, self.number = where, ranks, number

    def send(self, trainer: pl.Trainer, where: str) -> None:
        is_here = trainer.fit_loop.total_batch_idx == 6 and not trainer.sanity_checking
        if is_here and where == self.where and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        self.send(trainer, "step")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.send(trainer, "save")

    def on_validation_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        if batch_idx == 0:
            self.send(trainer, "validation")


HOW = {"val_check_interval": 2}


def whole() -> Any:
    return fit([], **HOW)


@pytest.fixture(scope="module")
def expected(pool: WorkerPool) -> Any:
    return pool.run(whole, 2)


def stopped(folder: Path, signals: Signal, slow_saves: bool) -> tuple[str, int, dict[str, Any]]:
    pl.seed_everything(0, verbose=False)
    model = Regression()
    # Lightning chooses the folder of the first callback, where a resume would not look.
    without_folder = ModelCheckpoint(save_top_k=0)
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    with pytest.MonkeyPatch.context() as patch:
        if slow_saves:
            Slow(patch, seconds=0.2)
        try:
            fit([without_folder, checkpoint, signals], model=model, enable_checkpointing=True, **HOW)
        except TrainingStopped as stop:
            return stop.path, stop.code, model.record
    raise AssertionError("it did not stop")


def resumed(path: str) -> Any:
    return fit([], path, seed=7, **HOW)


@pytest.mark.parametrize(
    ("where", "ranks", "number"),
    one_in(
        2,
        [
            ("step", [0], signal.SIGTERM),
            ("step", [1], signal.SIGTERM),
            ("step", [0, 1], signal.SIGUSR1),
            ("save", [1], signal.SIGUSR1),
            ("save", [0, 1], signal.SIGTERM),
            ("validation", [1], signal.SIGTERM),
        ],
    ),
)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    pool: WorkerPool, expected: Any, tmp_path: Path, where: str, ranks: list[int], number: int
) -> None:
    stops = pool.run(stopped, 2, tmp_path, Signal(where, ranks, number), where == "save")
    assert {(path, code) for path, code, _ in stops} == {(str(tmp_path / "last-stopped.ckpt"), EXIT_STOPPED)}
    after = pool.run(resumed, 2, stops[0][0])
    for rank in range(2):
        before, (record, weights, buffers, ends, _) = stops[rank][2], after[rank]
        assert max(int(key.split()[1]) for key in before) <= 8
        assert {**before, **record} == expected[rank][0]
        assert not {key for key in before if key.startswith("train")} & set(record)
        assert ends == expected[rank][3][1:]
        for ours, theirs in ((weights, expected[rank][1]), (buffers, expected[rank][2])):
            for name, value in ours.items():
                np.testing.assert_array_equal(value, theirs[name], name)


SCRIPT = """
import sys, time
import lightning.pytorch as pl, torch
from lightning.pytorch.callbacks import ModelCheckpoint
import lightning_dist
from lightning_dist.plugins.callbacks import FaultTolerance
from tests.models import GPT

grace_seconds = float(sys.argv[2])
if grace_seconds < 1:
    from lightning_dist.checkpoint import storage
    storage.NewFile.write = lambda *args: time.sleep(30)

class Slowly(pl.Callback):
    def on_train_batch_start(self, trainer, *args):
        time.sleep(0.05)
        if trainer.global_step == 2:
            print("READY", trainer.global_rank, flush=True)

trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="full_shard", max_steps=400, logger=False, enable_progress_bar=False,
    enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False, default_root_dir=sys.argv[1],
    callbacks=[
        Slowly(), FaultTolerance(grace_seconds),
        ModelCheckpoint(sys.argv[1] + "/checkpoints", every_n_train_steps=int(sys.argv[3]), save_top_k=-1),
    ],
)
trainer.fit(GPT())
"""


def stop_launched_job(folder: Path, grace_seconds: float, forked: bool = False) -> tuple[int | None, str]:
    """Launch a job, send SIGTERM to the rank that was launched last, and return the exit code and the output."""
    process, last = launch(SCRIPT, folder, str(grace_seconds), "1000", forked=forked)
    os.kill(last, signal.SIGTERM)
    output, _ = process.communicate(timeout=25)
    return process.returncode, output


def test_a_stopped_job_saves_and_exits_with_the_code_for_stopped_runs(tmp_path: Path) -> None:
    code, output = stop_launched_job(tmp_path, 20.0)
    assert code == EXIT_STOPPED, output
    assert re.search(
        r"Stopped by SIGTERM after step \d+; saved .*checkpoints/last-stopped.ckpt, from .* resumes", output
    ), output
    assert "Exit code 75: stopped on request, and saved." in output
    assert [Path(path).name for path, _ in find(tmp_path / "checkpoints")] == ["last-stopped.ckpt"]


@pytest.mark.thorough
def test_a_save_that_exceeds_the_grace_period_ends_the_run_with_an_error(tmp_path: Path) -> None:
    code, output = stop_launched_job(tmp_path, 0.5, forked=True)
    assert code == 1, output
    assert "was not written within grace_seconds=0.5" in output
    assert find(tmp_path / "checkpoints") == []


@pytest.mark.parametrize(
    ("killed", "death"),
    one_in(
        2,
        [
            (1, "Rank 1 was killed by SIGKILL, perhaps by the kernel's out-of-memory killer (dmesg shows it)."),
            (
                0,
                "Rank 0, which had started the others, has ended. If it shows no error of its own above, it was killed",
            ),
        ],
    ),
)
def test_a_killed_rank_is_reported_in_one_sentence_with_the_newest_checkpoint(
    tmp_path: Path, killed: int, death: str
) -> None:
    process, last = launch(SCRIPT, tmp_path, "20", "1", forked=True)
    while not find(tmp_path / "checkpoints"):
        time.sleep(0.05)
    os.kill(last if killed else process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=25)
    assert process.returncode == (1 if killed else -signal.SIGKILL), output
    (report,) = [line for line in output.splitlines() if line.startswith(death)]
    saved = re.search(r"The newest checkpoint is (\S+), saved after step (\d+): ckpt_path='\1' resumes", report)
    assert saved, report
    assert Path(saved[1]).resolve() in [Path(path) for path, _ in find(tmp_path / "checkpoints")]
    assert "Traceback" not in output
    assert "frame #" not in output


@pytest.mark.parametrize(
    ("number", "death"),
    [
        (signal.SIGSEGV, "Rank 3 crashed in native code, by SIGSEGV; PYTHONFAULTHANDLER=1 shows the line"),
        (signal.SIGTERM, "Rank 3 was ended by SIGTERM."),
    ],
)
def test_the_signal_that_ended_a_rank_is_named(number: int, death: str) -> None:
    assert launcher.describe_death(3, number).startswith(death)


class CtrlC(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise KeyboardInterrupt


def interrupted(folder: Path | None) -> tuple[Any, list[str]]:
    texts: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    saves = [] if folder is None else [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_checkpoints, "rank_zero_info", texts.append)
        try:
            fit([CtrlC(), *saves], enable_checkpointing=folder is not None)
        except SystemExit as stop:
            return stop.code, texts
        finally:
            signal.signal(signal.SIGINT, handler)  # Lightning ignores further signals.
    raise AssertionError("it did not stop")


def test_ctrl_c_says_what_was_saved_and_what_the_exit_code_means(pool: WorkerPool, tmp_path: Path) -> None:
    for folder, saved in (
        (
            tmp_path,
            f"The newest checkpoint is {os.path.relpath(tmp_path / 'step=2.ckpt')}, saved after step 2: ckpt_path=",
        ),
        (None, "The run has saved no checkpoint to resume from; ModelCheckpoint(every_n_train_steps=...) saves some."),
    ):
        for code, texts in pool.run(interrupted, 2, folder):
            assert code == 1
            assert [text for text in texts if saved in text and "exit code 1: the run is not done" in text], texts


@pytest.mark.parametrize("kwargs", [{"grace_seconds": 0}, {"hang_timeout": -1.0}], ids=str)
def test_times_that_are_not_positive_are_refused(kwargs: dict[str, float]) -> None:
    name, value = next(iter(kwargs.items()))
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match=f"{name}={value}"):
        FaultTolerance(**kwargs)
