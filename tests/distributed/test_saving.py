"""Test that saves in the background write the weights of their step while training continues, also if some fail."""

from __future__ import annotations

import os
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch.distributed.checkpoint.staging import DefaultStager

from lightning_dist.checkpoint import CheckpointError, file_system, find, read_whole, storage, verify, writer
from lightning_dist.checkpoint.locate import storage_at
from lightning_dist.plugins.strategies import mesh, run_checkpoints
from lightning_dist.run.parity import whole_parameters
from tests.distributed.fit import make_trainer
from tests.models import GPT
from tests.pool import RankFailed, WorkerPool


class Slow:
    """Delay the first write to every new file of this process.

    Args:
        monkeypatch: Fixture that undoes the patch.
        seconds: Longest delay in seconds, which ``release`` can end earlier; None: 60.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float | None = None) -> None:
        self.release = threading.Event()
        write = storage.NewFile.write

        def slow(file: Any, data: Any) -> None:
            if file.size == 0:
                self.release.wait(seconds or 60)
            write(file, data)

        monkeypatch.setattr(storage.NewFile, "write", slow)


def fail_writes(monkeypatch: pytest.MonkeyPatch, which: set[str], rank: str = "1") -> None:
    """Make the saves of the checkpoints with the names ``which`` fail on rank ``rank``, for lack of disk space."""
    create = file_system.LocalStorage.create

    def full(self: Any, save_id: str, name: str) -> Any:
        file = create(self, save_id, name)
        if self.path.name in which and os.environ["RANK"] == rank:

            def no_space(data: Any) -> None:
                raise OSError(28, "No space left on device")

            file._write = no_space
        return file

    monkeypatch.setattr(file_system.LocalStorage, "create", full)


class AtSteps(pl.Callback):
    """Call the function in ``actions`` for the current global step after each batch."""

    def __init__(self, actions: dict[int, Any]) -> None:
        self.actions = actions

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step in self.actions:
            self.actions[trainer.global_step](trainer, pl_module)


def every_step(folder: Path, **kwargs: Any) -> ModelCheckpoint:
    """Make a ModelCheckpoint that saves after every step and keeps all checkpoints."""
    defaults = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}
    return ModelCheckpoint(folder, **{**defaults, **kwargs})


def fit(
    callbacks: list[Any],
    layout: str = "full_shard",
    strategy: dict[str, Any] | None = None,
    make: Any = GPT,
    **kwargs: Any,
) -> Any:
    defaults: dict[str, Any] = {"max_steps": 6, "precision": "64-true", "enable_checkpointing": True}
    torch.manual_seed(0)
    model = make(optimizer="adamw")
    trainer = make_trainer(layout, strategy, callbacks=callbacks, **{**defaults, **kwargs})
    trainer.fit(model)
    return trainer


def goes_on(folder: Path) -> tuple[list[bool], dict[str, torch.Tensor], Any]:
    """Save after step 2, and delay the writes until step 5.

    Returns:
        Whether the checkpoint was there after steps 3, 4 and 5, the weights of step 2, and the saved step and weights.
    """
    there: list[bool] = []
    weights: dict[str, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        slow = Slow(patch)

        def save(trainer: Any, module: Any) -> None:
            weights.update(whole_parameters(module))
            trainer.save_checkpoint(folder / "run.ckpt")

        def look(trainer: Any, module: Any) -> None:
            there.append((folder / "run.ckpt").exists())

        def release(trainer: Any, module: Any) -> None:
            slow.release.set()
            trainer.strategy.wait_for_checkpoints()
            look(trainer, module)

        fit([AtSteps({2: save, 3: look, 4: look, 5: release})], enable_checkpointing=False)
    whole: dict[str, torch.Tensor] = {}

    def template(info: Any) -> torch.Tensor:
        whole["/".join(map(str, info.path))] = torch.empty(info.shape, dtype=info.dtype)
        return whole["/".join(map(str, info.path))]

    from lightning_dist.checkpoint import read

    saved = read(folder / "run.ckpt", template)
    return there, weights, {"step": saved["global_step"], **saved["state_dict"]}


def test_training_goes_on_while_the_weights_of_the_save_are_written(pool: WorkerPool, tmp_path: Path) -> None:
    for there, weights, saved in pool.run(goes_on, 4, tmp_path):
        assert there == [False, False, True]
        assert saved["step"] == 2
        for name, weight in weights.items():
            assert torch.equal(saved[name], weight), name


def run_with_failures(folder: Path, which: set[str], **kwargs: Any) -> tuple[list[str], str, str, str]:
    error = ""
    checkpoint = every_step(folder, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        fail_writes(patch, which)
        try:
            fit([checkpoint])
        except CheckpointError as raised:
            error = str(raised)
    return (
        sorted(Path(path).name for path, _ in find(folder)),
        checkpoint.last_model_path,
        checkpoint.best_model_path,
        error,
    )


class Unpicklable(pl.Callback):
    """Add an object that cannot be pickled to the checkpoint of step 2 on rank 1."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            checkpoint["mine"] = threading.Lock()


def save_what_one_rank_cannot(folder: Path) -> list[str]:
    fit([Unpicklable(), every_step(folder)], max_steps=3)
    return sorted(Path(path).name for path, _ in find(folder))


def test_a_rank_that_cannot_pickle_its_part_makes_the_save_fail_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(save_what_one_rank_cannot, 2, tmp_path) == [["step=1.ckpt", "step=3.ckpt"]] * 2


def storage_errors(folder: Path) -> tuple[list[str], list[str]]:
    """Save while the verification fails on rank 1 with an unexpected error.

    Returns:
        The checkpoints that are there at the end, and a list of the error and the name of the best checkpoint.
    """

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the storage is away")

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(writer, "verify", fail)
        checkpoint = every_step(folder, save_top_k=1)
        error = ""
        try:
            fit([checkpoint], max_steps=3)
        except CheckpointError as raised:
            error = str(raised)
    return sorted(Path(path).name for path, _ in find(folder)), [error, Path(checkpoint.best_model_path).name]


def test_unexpected_errors_of_the_storage_are_raised_and_do_not_end_the_writer(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for names, (error, best) in pool.run(storage_errors, 2, tmp_path, timeout_s=60):
        assert names == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]  # No older checkpoint was removed.
        assert "the storage is away" in error
        assert best in names


def test_training_goes_on_after_a_failed_save(pool: WorkerPool, tmp_path: Path) -> None:
    for names, _, best, error in pool.run(run_with_failures, 4, tmp_path, {"step=2.ckpt", "step=4.ckpt"}):
        assert names == [f"step={step}.ckpt" for step in (1, 3, 5, 6)]
        assert Path(best).name == "step=6.ckpt"
        assert error == ""
    assert not (tmp_path / ".tmp").exists()


def test_fit_raises_if_the_newest_save_failed(pool: WorkerPool, tmp_path: Path) -> None:
    for names, _, best, error in pool.run(run_with_failures, 4, tmp_path, {"step=6.ckpt"}):
        assert names[-1] == Path(best).name == "step=5.ckpt"
        assert "step=6.ckpt was not written" in error
        assert "rank 1" in error
        assert "No space left on device" in error


def test_the_checkpoint_that_a_failed_save_would_have_replaced_is_kept(pool: WorkerPool, tmp_path: Path) -> None:
    """Check this although ModelCheckpoint removes its only checkpoint as soon as it has requested the next save."""
    for names, _, best, _ in pool.run(run_with_failures, 4, tmp_path, {"step=6.ckpt"}, save_top_k=1):
        assert names == ["step=5.ckpt"]
        assert Path(best).name == "step=5.ckpt"
    for path, _ in find(tmp_path):
        verify(path)


def scored(folder: Path, scores: list[float], failing: set[str], top_k: int) -> tuple[list[str], dict[str, float], str]:
    """Save the ``top_k`` best checkpoints by a metric with the given scores, one per step.

    Returns:
        The checkpoints on the disk, ModelCheckpoint's names and scores of the best ones, and its best one.
    """

    class Score(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.log("score", scores[trainer.global_step - 1])

    checkpoint = every_step(folder, monitor="score", save_top_k=top_k)
    with pytest.MonkeyPatch.context() as patch:
        fail_writes(patch, failing)
        with suppress(CheckpointError):  # It is raised if the last save failed.
            fit([Score(), checkpoint], max_steps=len(scores))
    models = {Path(path).name: round(float(score), 3) for path, score in checkpoint.best_k_models.items()}
    return sorted(Path(path).name for path, _ in find(folder)), models, Path(checkpoint.best_model_path).name


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        (set(), {"step=3.ckpt": 0.5, "step=5.ckpt": 0.4}),
        ({"step=5.ckpt"}, {"step=2.ckpt": 0.7, "step=3.ckpt": 0.5}),
        ({"step=2.ckpt", "step=3.ckpt"}, {"step=4.ckpt": 0.8, "step=5.ckpt": 0.4}),
    ],
    ids=["none", "the best", "two in a row"],
)
def test_the_best_k_checkpoints_are_chosen_among_the_saves_that_did_not_fail(
    pool: WorkerPool, tmp_path: Path, failing: set[str], expected: dict[str, float]
) -> None:
    for names, models, best in pool.run(scored, 2, tmp_path, [0.9, 0.7, 0.5, 0.8, 0.4, 0.95], failing, 2):
        assert names == sorted(expected)
        assert models == expected
        assert best == min(expected, key=expected.__getitem__)


def test_saves_with_the_same_name_get_different_versions(pool: WorkerPool, tmp_path: Path) -> None:
    """Check that ModelCheckpoint takes a checkpoint that is still being written for an existing file."""
    names = pool.run(one_name, 2, tmp_path)[0]
    assert names == ["best-v1.ckpt", "best.ckpt"]


def one_name(folder: Path) -> list[str]:
    class Score(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.log("score", 1.0 / trainer.global_step)

    with pytest.MonkeyPatch.context() as patch:
        Slow(patch, seconds=0.1)
        fit([Score(), every_step(folder, filename="best", monitor="score", save_top_k=2)])
    return sorted(Path(path).name for path, _ in find(folder))


class Notes(DummyLogger):
    """Record whether a checkpoint exists when the logger is notified of it, and record all metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.notices: list[tuple[str, bool]] = []
        self.metrics: list[dict[str, float]] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = Path(checkpoint_callback.best_model_path)
        self.notices.append((path.name, path.exists()))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.metrics.append({**metrics, "at": step})


def notices_of_saves(folder: Path) -> tuple[list[tuple[str, bool]], list[dict[str, float]]]:
    logger = Notes()
    with pytest.MonkeyPatch.context() as patch:
        Slow(patch, seconds=0.1)
        fail_writes(patch, {"step=4.ckpt"}, rank="0")
        fit([every_step(folder, every_n_train_steps=2)], logger=logger)
    assert "after_save_checkpoint" not in vars(logger)
    return logger.notices, [metrics for metrics in logger.metrics if "checkpoint/failed" in metrics]


def test_loggers_are_notified_of_existing_checkpoints_and_get_the_costs_of_saves(
    pool: WorkerPool, tmp_path: Path
) -> None:
    notices, metrics = pool.run(notices_of_saves, 2, tmp_path)[0]
    assert [exists for _, exists in notices] == [True, True]
    assert [(entry["at"], entry["checkpoint/failed"]) for entry in metrics] == [(2, 0), (4, 1), (6, 1)]
    for entry in metrics:
        assert entry["checkpoint/stall_ms"] > 0
        if entry["at"] != 4:
            assert entry["checkpoint/write_s"] > 0.1
            assert entry["checkpoint/mib"] > 0


def change_weights_in_a_thread(folder: Path) -> str:
    """Save, and change a weight in a thread before it is copied: the copy is delayed until the change.

    A hook itself would wait for the copy, but what a thread changes is not seen.

    Returns:
        The error of the fit, or ``"no error"``.
    """
    changed = threading.Event()
    stage = DefaultStager.stage

    def late(self: Any, state: Any) -> Any:
        self._staging_executor.submit(changed.wait, 60)
        return stage(self, state)

    @torch.no_grad()
    def change(module: Any) -> None:
        next(module.parameters()).add_(1.0)
        changed.set()

    def save(trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(folder / "run.ckpt")
        thread = threading.Thread(target=change, args=(module,))
        thread.start()
        thread.join()

    # The patch must last until the end of the fit, because the writer's thread may copy the weights only after
    # save_checkpoint has returned.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultStager, "stage", late)
        try:
            fit([AtSteps({2: save})], enable_checkpointing=False)
        except CheckpointError as error:
            return str(error)
    return "no error"


def test_weights_that_change_while_they_are_copied_are_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    for error in pool.run(change_weights_in_a_thread, 2, tmp_path):
        assert "mix two steps" in error
        assert "asynchronous=False" in error
    assert find(tmp_path) == []


class ChangesItself(GPT):
    """Change a weight after step 2, in the hook or step whose name is ``where``."""

    where = ""

    @torch.no_grad()
    def change(self, where: str) -> None:
        if where == self.where and self.trainer.global_step == 2:
            self.model.blocks[1].norm_1.weight.add_(1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.change("on_train_batch_end")

    def on_validation_model_eval(self) -> None:
        self.change("on_validation_model_eval")
        super().on_validation_model_eval()

    def train(self, mode: bool = True) -> Any:
        if not mode:
            self.change("train")
        return super().train(mode)

    def training_step(self, *args: Any) -> Any:
        self.change("training_step")
        return super().training_step(*args)


def change_weights(folder: Path, where: str) -> list[float]:
    """Change a weight in a hook or step right after a save, whose copy is delayed.

    Returns:
        The first element of the weight: before the change, and in the checkpoint.
    """
    stage = DefaultStager.stage
    values = []

    def late(self: Any, state: Any) -> Any:
        self._staging_executor.submit(time.sleep, 0.5)
        return stage(self, state)

    def save(trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(folder / "run.ckpt")
        values.append(float(module.model.blocks[1].norm_1.weight.full_tensor()[0]))

    ChangesItself.where = where
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultStager, "stage", late)
        validation = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
        fit([AtSteps({2: save})], make=ChangesItself, enable_checkpointing=False, **validation)
    return [*values, float(read_whole(folder / "run.ckpt")["state_dict"]["model.blocks.1.norm_1.weight"][0])]


@pytest.mark.parametrize("where", ["on_train_batch_end", "on_validation_model_eval", "train", "training_step"])
def test_hooks_and_steps_that_change_weights_wait_until_they_are_copied(
    pool: WorkerPool, tmp_path: Path, where: str
) -> None:
    for before, saved in pool.run(change_weights, 2, tmp_path, where):
        assert saved == before


def save_while_locked(folder: Path) -> list[str]:
    """Save while the folder is locked, as by another run, and again after it was unlocked; return the errors."""
    errors = []
    other = storage_at(folder / "other.ckpt")
    unlock = other.lock() if os.environ["RANK"] == "0" else lambda: None
    try:
        fit([every_step(folder)], max_steps=1)
    except CheckpointError as error:
        errors.append(str(error))
    unlock()
    fit([every_step(folder)], max_steps=1)
    return errors


def test_two_runs_cannot_save_to_one_folder_at_the_same_time(pool: WorkerPool, tmp_path: Path) -> None:
    for errors in pool.run(save_while_locked, 2, tmp_path):
        assert len(errors) == 1
        assert "another run (process " in errors[0]
        assert f"saves to {tmp_path}" in errors[0]
    assert len(find(tmp_path)) == 1


def synchronous(folder: Path) -> list[bool]:
    there: list[bool] = []

    def save(trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(folder / "run.ckpt")
        there.append((folder / "run.ckpt").exists())

    from lightning_dist.plugins.strategies import CheckpointOptions

    with pytest.MonkeyPatch.context() as patch:
        Slow(patch, seconds=0.1)
        strategy = {"checkpoint": CheckpointOptions(asynchronous=False)}
        fit([AtSteps({2: save})], strategy=strategy, enable_checkpointing=False)
    return there


def test_synchronous_saves_are_complete_when_the_call_returns(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(synchronous, 4, tmp_path) == [[True]] * 4


def save_on_separate_disks(folder: Path) -> str:
    """Save while rank 1 does not see the folders that rank 0 creates, and works in another directory.

    Returns:
        The error of the fit, or ``"no error"``.
    """
    (folder / os.environ["RANK"]).mkdir()
    before = os.getcwd()
    os.chdir(folder / os.environ["RANK"])
    try:
        with pytest.MonkeyPatch.context() as patch:
            if os.environ["RANK"] == "1":
                own = file_system.LocalStorage._folder
                patch.setattr(
                    file_system.LocalStorage, "_folder", lambda self, save_id: own(self, save_id) / "elsewhere"
                )
            fit([AtSteps({2: lambda trainer, _: trainer.save_checkpoint("run.ckpt")})], enable_checkpointing=False)
    except CheckpointError as error:
        return str(error)
    finally:
        os.chdir(before)
    return "no error"


def test_saving_raises_if_the_ranks_do_not_share_a_disk(pool: WorkerPool, tmp_path: Path) -> None:
    for error in pool.run(save_on_separate_disks, 2, tmp_path):
        assert "rank 1 does not see the folder that rank 0 created" in error and "all ranks share" in error
        assert str(tmp_path / "0" / "run.ckpt") in error
    assert not (tmp_path / "0" / "run.ckpt").exists()


def error_on_one_rank(folder: Path) -> None:
    """Train with a callback that saves on errors, and raise an error on rank 1 only, which then saves alone."""

    class Raises(GPT):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 and self.global_rank == 1:
                raise ValueError("rank 1 alone")
            return super().training_step(batch, batch_idx)

    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_checkpoints, "AFTER_ERROR_S", 2.0)
        patch.setattr(mesh, "AFTER_ERROR_S", 2.0)
        try:
            callbacks = [OnExceptionCheckpoint(folder)]
            trainer = make_trainer("full_shard", callbacks=callbacks, max_steps=5, enable_checkpointing=True)
            trainer.fit(Raises())
        except Exception as error:
            if os.environ["RANK"] == "1":
                (folder / "shown").write_text("".join(traceback.format_exception(error)))
                (folder / "seconds").write_text(f"{time.monotonic() - start}")
            raise


def test_a_save_after_an_error_of_one_rank_does_not_hang(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        pool.run(error_on_one_rank, 2, tmp_path, timeout_s=60, grace_s=0.5)
    shown = (tmp_path / "shown").read_text()
    assert 0 < shown.find("ValueError: rank 1 alone") < shown.find("rank 0 did not arrive within 2 s")
    assert float((tmp_path / "seconds").read_text()) < 10


def error_on_one_rank_is_caught(folder: Path) -> None:
    """Train while rank 1 raises an error, which it catches, and start another training."""

    class Raises(GPT):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and self.global_rank == 1:
                raise ValueError("rank 1 alone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_checkpoints, "AFTER_ERROR_S", 2.0)
        patch.setattr(mesh, "AFTER_ERROR_S", 2.0)
        with suppress(ValueError):
            make_trainer("full_shard", max_steps=5).fit(Raises())
        try:
            make_trainer("full_shard", max_steps=5).fit(GPT())
        except Exception as error:
            (folder / "shown").write_text(str(error))
            raise


def test_a_run_after_an_error_of_one_rank_does_not_hang(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        pool.run(error_on_one_rank_is_caught, 2, tmp_path, timeout_s=60, grace_s=0.5)
    shown = (tmp_path / "shown").read_text()
    assert "failed on rank 1 (ValueError: rank 1 alone), but not on rank 0, which still waits for it" in shown
