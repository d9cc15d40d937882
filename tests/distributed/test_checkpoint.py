"""Test that checkpoints are saved, resumed in the same and in other layouts, and consolidated to one file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import xxhash
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dist.checkpoint import CheckpointError, consolidate, read_manifest
from lightning_dist.run.parity import whole_parameters
from tests.behaviour.models import Classifier, samples
from tests.distributed.fit import make_trainer
from tests.models import GPT
from tests.pool import RankFailed, WorkerPool
from tests.thorough import one_in

NUM_STEPS, SAVE_AT = 8, 4


class LossCurve(pl.Callback):
    """Record the loss of the global batch at every step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])


class Scheduled(GPT):
    """Train with two parameter groups and a learning rate schedule, as a real run has."""

    def configure_optimizers(self) -> Any:
        decay = [param for param in self.parameters() if param.ndim > 1]
        rest = [param for param in self.parameters() if param.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = self.make_optimizer(groups)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def save_every_epoch(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", save_on_train_epoch_end=True, save_last=True, save_top_k=-1)


def curve(
    layout: str, folder: Path, num_steps: int, optimizer: str, ckpt_path: str | None = None
) -> tuple[dict[int, float], dict[str, np.ndarray]]:
    """Train with four steps per epoch, and save at the end of every epoch.

    Returns:
        The losses by step, and the final weights.
    """
    torch.manual_seed(0)
    model = Scheduled(optimizer=optimizer)
    losses = LossCurve()
    trainer = make_trainer(
        layout, callbacks=[losses, save_every_epoch(folder)], enable_checkpointing=True, precision="64-true",
        max_epochs=num_steps // SAVE_AT, limit_train_batches=SAVE_AT,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=ckpt_path)
    return losses.losses, {name: weight.numpy() for name, weight in whole_parameters(model).items()}


@pytest.mark.parametrize("optimizer", one_in(2, ["adamw", "plain_sgd"]))
def test_a_resumed_run_has_the_losses_and_weights_of_the_uninterrupted_one_in_every_layout(
    pool: WorkerPool, tmp_path: Path, optimizer: str
) -> None:
    whole = pool.run(curve, 4, "2x2", tmp_path / "whole", NUM_STEPS, optimizer)[0]
    saved = str(tmp_path / "whole" / "step=4.ckpt")
    assert sorted(whole[0]) == list(range(1, NUM_STEPS + 1))
    for layout, num_ranks, path in [("2x2", 4, saved), ("full_shard", 4, saved), ("1x2", 2, saved), ("auto", 1, saved)]:
        if layout == "auto":  # One process with Lightning's own strategy resumes from the consolidated file.
            path = str(tmp_path / f"one-{optimizer}.ckpt")
            consolidate(Path(saved), Path(path))
        losses, weights = pool.run(curve, num_ranks, layout, tmp_path / layout, NUM_STEPS, optimizer, path)[0]
        assert sorted(losses) == list(range(SAVE_AT + 1, NUM_STEPS + 1))
        # The same layout repeats the same sums; another one rounds differently. Lightning's own strategy loads a
        # float64 checkpoint before it converts the module to float64, and so rounds the checkpoint to float32.
        tolerance = {"2x2": 0.0, "auto": 1e-6}.get(layout, 1e-10)
        for step, loss in losses.items():
            assert loss == pytest.approx(whole[0][step], rel=tolerance, abs=0)
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, whole[1][name], rtol=0, atol=tolerance * abs(whole[1][name]).max())


def last(folder: Path) -> int:
    """Resume "last" and return the step that training went on from."""
    steps: list[int] = []

    class FirstStep(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            steps.append(trainer.global_step)

    trainer = make_trainer(
        "2x2", callbacks=[FirstStep(), save_every_epoch(folder)], enable_checkpointing=True, max_steps=NUM_STEPS + 1,
        limit_train_batches=SAVE_AT, precision="64-true",
    )  # fmt: skip
    trainer.fit(Scheduled(optimizer="adamw"), ckpt_path="last")
    return steps[0]


def test_every_rank_resumes_from_the_last_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(curve, 4, "2x2", tmp_path, NUM_STEPS, "adamw")
    assert pool.run(last, 4, tmp_path) == [NUM_STEPS] * 4


def test_a_consolidated_file_loads_without_lightning_dist(pool: WorkerPool, tmp_path: Path) -> None:
    _, weights = pool.run(curve, 4, "2x2", tmp_path, SAVE_AT, "adamw")[0]
    consolidate(tmp_path / "step=4.ckpt", tmp_path / "one.ckpt")
    consolidate(tmp_path / "step=4.ckpt", tmp_path / "one.safetensors")
    np.savez(tmp_path / "weights.npz", **weights)
    # The script runs in a process in which importing lightning_dist fails.
    script = f"""
import sys
sys.modules["lightning_dist"] = None
import numpy, torch
from safetensors.torch import load_file
from tests.models import GPT
model = GPT.load_from_checkpoint({str(tmp_path / "one.ckpt")!r}, map_location="cpu", weights_only=False)
expected = numpy.load({str(tmp_path / "weights.npz")!r})
assert model.hparams.optimizer == "adamw", model.hparams
tensors = load_file({str(tmp_path / "one.safetensors")!r})
for name, param in model.named_parameters():
    # The file has float64; the model that loads it is float32.
    assert numpy.array_equal(param.detach().numpy(), expected[name].astype("float32")), name
    assert numpy.array_equal(tensors[name].numpy(), expected[name]), name
assert tensors["model.head.weight"].shape == tensors["model.embedding.weight"].shape
print(len(expected.files), "equal")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{len(weights)} equal"


def within_epoch(path: Path, ckpt_path: Path | None, max_steps: int) -> list[float]:
    """Fit a model of ordinary data to within an epoch, save it, and return the sums of the batches of this rank."""
    sums: list[float] = []

    class Sums(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            sums.append(float(batch[0].sum()))

    trainer = make_trainer("full_shard", use_distributed_sampler=True, max_steps=max_steps, precision="64-true")
    loader = DataLoader(samples(48), 4, shuffle=True)
    trainer.fit(Sums(), loader, ckpt_path=None if ckpt_path is None else str(ckpt_path), weights_only=False)
    trainer.save_checkpoint(path)
    return sums


def resume_in_one_process(path: Path) -> tuple[int, dict[str, np.ndarray]]:
    """Resume a directory under Lightning's own strategy, and return the last step and the weights."""
    model = Classifier()
    trainer = make_trainer("auto", devices=1, max_steps=6, precision="64-true")
    trainer.fit(model, DataLoader(samples(48), 4), ckpt_path=str(path), weights_only=False)
    return trainer.global_step, {name: weight.numpy() for name, weight in model.state_dict().items()}


@pytest.mark.thorough
def test_a_consolidated_file_of_within_an_epoch_is_resumed_here_and_by_lightning_alone(
    pool: WorkerPool, reference_pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(within_epoch, 2, tmp_path / "a.ckpt", None, 3)
    consolidate(tmp_path / "a.ckpt", tmp_path / "one.ckpt")
    resumed = [reference_pool.run(resume_in_one_process, 1, tmp_path / name)[0] for name in ("a.ckpt", "one.ckpt")]
    assert [step for step, _ in resumed] == [6, 6]
    assert all((weight == resumed[1][1][name]).all() for name, weight in resumed[0][1].items())
    from_directory = pool.run(within_epoch, 2, tmp_path / "b.ckpt", tmp_path / "a.ckpt", 6)
    from_file = pool.run(within_epoch, 2, tmp_path / "c.ckpt", tmp_path / "one.ckpt", 6)
    assert from_file == from_directory
    assert len(from_file[0]) == 3
    script = f"""
import sys
sys.modules["lightning_dist"] = None
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from tests.behaviour.models import Classifier, samples
trainer = pl.Trainer(
    accelerator="cpu", devices=1, max_steps=6, logger=False, enable_checkpointing=False, precision="64-true"
)
trainer.fit(Classifier(), DataLoader(samples(48), 4), ckpt_path={str(tmp_path / "one.ckpt")!r}, weights_only=False)
print("step", trainer.global_step)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("step 6"), done.stderr


def resume(path: str, layout: str = "2x2") -> str:
    """Return the error that resuming from ``path`` raises, and check that it changed no weight."""
    torch.manual_seed(0)
    model = Scheduled(optimizer="adamw")
    before = {name: param.detach().double().clone() for name, param in model.named_parameters()}
    trainer = make_trainer(layout, max_steps=NUM_STEPS, precision="64-true")
    try:
        trainer.fit(model, ckpt_path=path)
    except Exception as error:
        for name, weight in whole_parameters(model).items():
            assert torch.equal(weight, before[name]), name
        return f"{type(error).__name__}: {error}"
    return "no error"


def resume_each(paths: list[str]) -> list[str]:
    return [resume(path) for path in paths]


def test_resuming_from_a_bad_checkpoint_raises_on_every_rank_and_changes_no_weight(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(curve, 4, "2x2", tmp_path / "run", SAVE_AT, "adamw")
    good = tmp_path / "run" / "step=4.ckpt"

    text = tmp_path / "notes.txt"
    text.write_text("not a checkpoint")
    torch.save({"weights": torch.ones(2)}, foreign := tmp_path / "foreign.ckpt")
    (empty := tmp_path / "empty").mkdir()
    consolidate(good, tmp_path / "one.ckpt")
    whole = torch.load(tmp_path / "one.ckpt", weights_only=False)
    del whole["state_dict"]["model.norm.weight"]
    torch.save(whole, lacking := tmp_path / "lacking.ckpt")
    whole = torch.load(tmp_path / "one.ckpt", weights_only=False)
    whole["state_dict"]["model.norm.weight"] = torch.ones(7)
    torch.save(whole, other_size := tmp_path / "other_size.ckpt")
    (damaged := tmp_path / "damaged").mkdir()
    for file in good.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    shard = bytearray((damaged / "rank_2.bin").read_bytes())
    shard[len(shard) // 2] ^= 1
    (damaged / "rank_2.bin").write_bytes(shard)
    (future := tmp_path / "future").mkdir()
    manifest = read_manifest(good)
    encoded = manifest.encode().partition(b"\n")[0].replace(b'"version": 2', b'"version": 99')
    (future / "manifest.json").write_bytes(encoded + b"\n" + xxhash.xxh3_128(encoded).hexdigest().encode())
    (good / "rank_1.bin").unlink()

    bad = [
        (good.parent / "step=5.ckpt", f"There is no checkpoint at .* There is .*{good.name}"),
        (text, "notes.txt is a file, but not one that torch.load can read"),
        (foreign, "foreign.ckpt is not a Lightning checkpoint: it has no 'state_dict'"),
        (empty, "empty is not a lightning-dist checkpoint: it has no manifest.json"),
        (lacking, r"The checkpoint does not fit Scheduled: it lacks 1 names \(model.norm.weight\)"),
        (other_size, r"The checkpoint's model.norm.weight has shape \(7,\), the model's \(20,\)"),
        (good, f"The checkpoint {good} cannot be read: its file rank_1.bin is missing"),
        (damaged, f"The checkpoint {damaged} cannot be read: its file rank_2.bin is damaged"),
        (future, "it has format version 99; this lightning-dist reads version 1 to 2"),
    ]
    for errors in pool.run(resume_each, 4, [str(path) for path, _ in bad]):  # Every rank raises the errors.
        for (_, expected), error in zip(bad, errors, strict=True):
            with pytest.raises(CheckpointError, match=expected):
                raise CheckpointError(error)


def save_on_full_disk(folder: Path) -> tuple[str, list[str]]:
    """Save twice to one path, the second time with no space for rank 1's shard."""
    import os

    model = GPT()
    trainer = make_trainer("2x2", max_steps=1)
    trainer.fit(model)
    trainer.save_checkpoint(folder / "run.ckpt")
    error = "no error"
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":

            def no_space(*args: Any) -> int:
                raise OSError(28, "No space left on device")

            patch.setattr(os, "write", no_space)
        try:
            trainer.save_checkpoint(folder / "run.ckpt")
        except CheckpointError as raised:
            error = str(raised)
    trainer.strategy.load_checkpoint(folder / "run.ckpt")
    return error, sorted(path.name for path in folder.rglob("*") if path.is_dir())


def test_a_save_that_fails_on_a_full_disk_of_one_rank_keeps_the_old_checkpoint(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for error, folders in pool.run(save_on_full_disk, 4, tmp_path):
        assert "run.ckpt was not written" in error
        assert "rank 1" in error
        assert "No space left on device" in error
        assert folders == ["run.ckpt"]


def test_the_worker_pool_reports_a_failing_rank_and_does_not_wait_for_the_others(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed, match="on purpose"):
        pool.run(fail_on_rank_1, 2, grace_s=0.5)


def fail_on_rank_1() -> None:
    import os
    import time

    if os.environ["RANK"] == "1":
        raise ValueError("on purpose")
    time.sleep(60)
