"""Test that ``ckpt_path="auto"`` and ``"last"`` resume from the newest good checkpoint, which retention keeps."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_dist import CheckpointOptions
from lightning_dist.checkpoint import CheckpointNotFoundError, find
from tests.distributed.fit import make_trainer
from tests.distributed.test_saving import every_step, fail_writes
from tests.models import GPT
from tests.pool import RankFailed, WorkerPool


class FirstStep(pl.Callback):
    step = -1

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.step = trainer.global_step


def run(
    folder: Path | None, num_steps: int, ckpt_path: str | None = None, layout: str = "full_shard",
    checkpoint: dict[str, Any] | None = None, failing: tuple[str, ...] = (), **kwargs: Any,
) -> tuple[int, list[str], list[str]]:  # fmt: skip
    """Train until step ``num_steps``, and save after every step.

    Args:
        folder: Folder of the checkpoints; None: ModelCheckpoint's default.
        num_steps: Global step to train to.
        ckpt_path: Checkpoint to resume from.
        layout: Layout of :func:`make_trainer`.
        checkpoint: Arguments of CheckpointOptions.
        failing: Names of checkpoints whose save fails on rank 1.
        kwargs: Arguments of ModelCheckpoint.

    Returns:
        The step that training started from, the warnings, and the names of the checkpoints that are there at the end.
    """
    first = FirstStep()
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        fail_writes(patch, set(failing))
        strategy = {"checkpoint": CheckpointOptions(**(checkpoint or {}))} if layout == "full_shard" else None
        trainer = make_trainer(
            layout, strategy, callbacks=[first, every_step(folder, **kwargs)], max_steps=num_steps,
            enable_checkpointing=True, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(GPT(), ckpt_path=ckpt_path)
    names = sorted(Path(path).name for path, _ in find(folder)) if folder else []
    return first.step, [str(warning.message) for warning in caught], names


def damage(path: Path) -> None:
    """Flip a bit in the file of rank 1."""
    with open(path / "rank_1.bin", "r+b") as file:
        file.seek(10)
        byte = file.read(1)
        file.seek(10)
        file.write(bytes([byte[0] ^ 1]))


def test_auto_starts_a_new_run_without_a_checkpoint_and_resumes_with_one(pool: WorkerPool, tmp_path: Path) -> None:
    assert [first for first, _, _ in pool.run(run, 2, tmp_path, 2, "auto")] == [0, 0]
    assert [first for first, _, _ in pool.run(run, 2, tmp_path, 4, "auto")] == [2, 2]


@pytest.mark.parametrize("ckpt_path", ["auto", "last"])
def test_damaged_checkpoints_are_skipped_with_a_warning(pool: WorkerPool, tmp_path: Path, ckpt_path: str) -> None:
    pool.run(run, 2, tmp_path, 3, None, save_last=True)
    for name in ("last", "step=3"):
        damage(tmp_path / f"{name}.ckpt")
    results = pool.run(run, 2, tmp_path, 4, ckpt_path, save_last=True)
    assert [first for first, _, _ in results] == [2, 2]
    warned = "\n".join(results[0][1])
    assert "last.ckpt" in warned and "step=3.ckpt" in warned and "Trying the one before" in warned


def test_a_damaged_checkpoint_that_the_user_names_is_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(run, 2, tmp_path, 3, None, save_last=True)
    damage(tmp_path / "last.ckpt")
    with pytest.raises(RankFailed, match=r"last\.ckpt cannot be read: its file rank_1.bin is damaged"):
        pool.run(run, 2, tmp_path, 4, str(tmp_path / "last.ckpt"))


def test_auto_raises_if_all_checkpoints_are_damaged(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(run, 2, tmp_path, 2)
    for path in tmp_path.glob("*.ckpt"):
        damage(path)
    with pytest.raises(RankFailed, match=r"None of the 2 checkpoints in .* can be read"):
        pool.run(run, 2, tmp_path, 4, "auto")


def test_auto_needs_a_folder_and_a_strategy_of_this_project(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="give ModelCheckpoint a dirpath"):
        pool.run(run, 2, None, 1, "auto")
    with pytest.raises(RankFailed, match="use 'last'"):
        pool.run(run, 2, tmp_path, 1, "auto", "ddp")


def test_retention_removes_checkpoints_that_callbacks_keep(pool: WorkerPool, tmp_path: Path) -> None:
    keep = {"keep_last": 2, "keep_every_n_steps": 3}
    names = pool.run(run, 2, tmp_path, 5, None, checkpoint=keep)[0][2]
    assert names == ["step=3.ckpt", "step=4.ckpt", "step=5.ckpt"]
    # A resumed run also removes the checkpoints that it saved before; those of another run are kept.
    names = pool.run(run, 2, tmp_path, 7, "auto", checkpoint=keep)[0][2]
    assert names == ["step=3.ckpt", "step=6.ckpt", "step=7.ckpt"]
    names = pool.run(run, 2, tmp_path, 2, None, checkpoint={"keep_last": 1})[0][2]
    assert names == ["step=2.ckpt", "step=3.ckpt", "step=6.ckpt", "step=7.ckpt"]


def test_retention_keeps_checkpoints_that_a_callback_would_remove(pool: WorkerPool, tmp_path: Path) -> None:
    names = pool.run(run, 2, tmp_path, 5, None, checkpoint={"keep_last": 3}, save_top_k=1)[0][2]
    assert names == ["step=3.ckpt", "step=4.ckpt", "step=5.ckpt"]


def test_a_failed_save_removes_no_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    names = pool.run(run, 2, tmp_path, 5, None, checkpoint={"keep_last": 1}, failing=("step=3.ckpt", "step=4.ckpt"))[0][
        2
    ]
    assert names == ["step=5.ckpt"]


def damaged_on_disk(folder: Path) -> tuple[list[str], str]:
    """Damage the newest checkpoint as soon as it is written, and return the files that are there, and the error."""
    from lightning_dist.checkpoint import file_system

    commit = file_system.LocalStorage.commit
    error = ""
    with pytest.MonkeyPatch.context() as patch:

        def commit_and_damage(self: Any, *args: Any) -> None:
            commit(self, *args)
            if self.path.name == "step=3.ckpt":
                damage(self.path)

        patch.setattr(file_system.LocalStorage, "commit", commit_and_damage)
        try:
            run(folder, 3, save_top_k=1)
        except Exception as raised:
            error = str(raised)
    return sorted(os.listdir(folder)), error


def test_an_older_checkpoint_is_only_removed_after_the_newest_was_verified(pool: WorkerPool, tmp_path: Path) -> None:
    for names, error in pool.run(damaged_on_disk, 2, tmp_path):
        assert {"step=2.ckpt", "step=3.ckpt"} <= set(names) and "step=1.ckpt" not in names
        assert "step=3.ckpt cannot be read: its file rank_1.bin is damaged" in error or "rank 1" in error


def evaluate(folder: Path, ckpt_path: str) -> str:
    trainer = make_trainer("full_shard", callbacks=[every_step(folder)], enable_checkpointing=True)
    with pytest.raises(CheckpointNotFoundError) as error:
        trainer.validate(GPT(), ckpt_path=ckpt_path)
    return str(error.value)


@pytest.mark.parametrize("ckpt_path", ["auto", "last"])
def test_nothing_is_evaluated_if_there_is_no_checkpoint(pool: WorkerPool, tmp_path: Path, ckpt_path: str) -> None:
    for error in pool.run(evaluate, 2, tmp_path, ckpt_path):
        assert "would run the weights that the module has now" in error
