"""``ckpt_path="auto"`` and ``"last"``, and which checkpoints are left for them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_dist import CheckpointOptions
from lightning_dist.checkpoint import find
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
    """Train to this step, saving at each; returns the first step, the warnings, and what is there at the end."""
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
    with open(path / "rank_1.bin", "r+b") as file:
        file.seek(10)
        byte = file.read(1)
        file.seek(10)
        file.write(bytes([byte[0] ^ 1]))


def test_auto_starts_afresh_and_then_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    assert [first for first, _, _ in pool.run(run, 2, tmp_path, 2, "auto")] == [0, 0]
    assert [first for first, _, _ in pool.run(run, 2, tmp_path, 4, "auto")] == [2, 2]


@pytest.mark.parametrize("ckpt_path", ["auto", "last"])
def test_damaged_ones_are_passed_over(pool: WorkerPool, tmp_path: Path, ckpt_path: str) -> None:
    pool.run(run, 2, tmp_path, 3, None, save_last=True)
    for name in ("last", "step=3"):
        damage(tmp_path / f"{name}.ckpt")
    results = pool.run(run, 2, tmp_path, 4, ckpt_path, save_last=True)
    assert [first for first, _, _ in results] == [2, 2]
    said = "\n".join(results[0][1])
    assert "last.ckpt" in said and "step=3.ckpt" in said and "Trying the one before" in said


def test_a_path_that_was_asked_for_is_not_passed_over(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(run, 2, tmp_path, 3, None, save_last=True)
    damage(tmp_path / "last.ckpt")
    with pytest.raises(RankFailed, match=r"last\.ckpt cannot be read: its file rank_1.bin is damaged"):
        pool.run(run, 2, tmp_path, 4, str(tmp_path / "last.ckpt"))


def test_where_none_is_good_nothing_starts_afresh(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(run, 2, tmp_path, 2)
    for path in tmp_path.glob("*.ckpt"):
        damage(path)
    with pytest.raises(RankFailed, match=r"None of the 2 checkpoints in .* can be read"):
        pool.run(run, 2, tmp_path, 4, "auto")


def test_auto_needs_a_folder_and_our_strategies(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="give ModelCheckpoint a dirpath"):
        pool.run(run, 2, None, 1, "auto")
    with pytest.raises(RankFailed, match="use 'last'"):
        pool.run(run, 2, tmp_path, 1, "auto", "ddp")


def test_retention_thins_out_what_callbacks_keep(pool: WorkerPool, tmp_path: Path) -> None:
    keep = {"keep_last": 2, "keep_every_n_steps": 3}
    names = pool.run(run, 2, tmp_path, 5, None, checkpoint=keep)[0][2]
    assert names == ["step=3.ckpt", "step=4.ckpt", "step=5.ckpt"]
    # A resumed run goes on with its own; another one's stay.
    names = pool.run(run, 2, tmp_path, 7, "auto", checkpoint=keep)[0][2]
    assert names == ["step=3.ckpt", "step=6.ckpt", "step=7.ckpt"]
    names = pool.run(run, 2, tmp_path, 2, None, checkpoint={"keep_last": 1})[0][2]
    assert names == ["step=2.ckpt", "step=3.ckpt", "step=6.ckpt", "step=7.ckpt"]


def test_retention_keeps_what_a_callback_would_remove(pool: WorkerPool, tmp_path: Path) -> None:
    names = pool.run(run, 2, tmp_path, 5, None, checkpoint={"keep_last": 3}, save_top_k=1)[0][2]
    assert names == ["step=3.ckpt", "step=4.ckpt", "step=5.ckpt"]


def test_a_failed_save_removes_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    names = pool.run(run, 2, tmp_path, 5, None, checkpoint={"keep_last": 1}, failing=("step=3.ckpt", "step=4.ckpt"))[0][
        2
    ]
    assert names == ["step=5.ckpt"]


def damaged_on_disk(folder: Path) -> tuple[list[str], str]:
    """The newest save is damaged as soon as it is written: what it would replace must stay."""
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


def test_nothing_older_goes_before_the_newest_proves_itself(pool: WorkerPool, tmp_path: Path) -> None:
    for names, error in pool.run(damaged_on_disk, 2, tmp_path):
        assert {"step=2.ckpt", "step=3.ckpt"} <= set(names) and "step=1.ckpt" not in names
        assert "step=3.ckpt cannot be read: its file rank_1.bin is damaged" in error or "rank 1" in error
