"""Test that a run that is resumed from a checkpoint at any place equals the uninterrupted run bit by bit."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_dist.plugins._compat import around_every_batch
from lightning_dist.run.parity import whole_parameters
from tests.distributed.fit import make_trainer
from tests.pool import RankFailed, WorkerPool
from tests.thorough import one_in

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 27, 3, 3
"""Two ranks have 14 samples each, after filling up, so an epoch has 5 batches, of which the last is shorter."""


class Noisy(Dataset[Any]):
    """Return samples that depend on their index, with noise from the generators of Python, NumPy and torch."""

    def __init__(self, length: int = NUM_SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        noise = random.random() + float(np.random.rand()) + torch.rand(6)
        return index, torch.randn(6, generator=generator) + 0.1 * noise


class Regression(pl.LightningModule):
    """Train with dropout, BatchNorm, a schedule by step and one by epoch, and a validation that draws random numbers.

    It records the batches, the losses and the ends of epochs.
    """

    def __init__(self, stateful: bool = False) -> None:
        super().__init__()
        self.stateful = stateful
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("drawn", torch.zeros(()))
        self.record: dict[str, Any] = {}
        self.ends: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index, x = batch
        loss = functional.mse_loss(self.net(x)[:, 0], x.sum(1))
        self.record[f"train {self.trainer.fit_loop.total_batch_idx}"] = (batch_idx, index.tolist(), loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x = batch
        torch.rand(1)
        loss = functional.mse_loss(self.net(x)[:, 0], x.sum(1))
        self.log("val/loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            step = self.trainer.fit_loop.total_batch_idx
            self.record[f"val {step}"] = float(self.trainer.callback_metrics["val/loss"])

    def on_train_epoch_end(self) -> None:
        self.ends.append(self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "interval": "epoch"},
        ]

    def train_dataloader(self) -> Any:
        if self.stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True)
        return DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(8), batch_size=2)


class Draws(pl.Callback):
    """Draw a random number and change a buffer after each batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        pl_module.drawn += torch.rand(())


class Everywhere(pl.Callback):
    """Save at all places where a callback may: after each batch, each validation, and each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, trainer: pl.Trainer, where: str) -> None:
        trainer.save_checkpoint(self.folder / f"{where}={trainer.fit_loop.total_batch_idx}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.save(trainer, "epoch")


def fit(callbacks: list[Any], ckpt_path: Any = None, seed: int = 0, model: Any = None, **kwargs: Any) -> Any:
    pl.seed_everything(seed, verbose=False)
    model = model or Regression()
    torch.manual_seed(1000 * seed + int(torch.distributed.is_initialized() and torch.distributed.get_rank()))
    trainer = make_trainer(
        "full_shard", callbacks=[Draws(), *callbacks], use_distributed_sampler=True, limit_val_batches=1.0,
        **{"max_epochs": NUM_EPOCHS, "check_val_every_n_epoch": 1, **kwargs},
    )  # fmt: skip
    trainer.fit(model, ckpt_path=ckpt_path)
    weights = {name: weight.numpy() for name, weight in whole_parameters(model).items()}
    buffers = {name: buffer.cpu().numpy().copy() for name, buffer in model.named_buffers()}
    return model.record, weights, buffers, model.ends, [group["lr"] for group in trainer.optimizers[0].param_groups]


def uninterrupted(folder: Path, **kwargs: Any) -> Any:
    return fit([Everywhere(folder)], **kwargs)


def resumed(path: Path, **kwargs: Any) -> Any:
    return fit([], path, seed=7, **kwargs)


def each_resumed(paths: list[Path], **kwargs: Any) -> list[Any]:
    return [resumed(path, **kwargs) for path in paths]


HOW = [
    {},
    {"val_check_interval": 2},
    {"accumulate_grad_batches": 2, "val_check_interval": 3},
    {"max_epochs": -1, "max_steps": 13},
]


@pytest.mark.parametrize("kwargs", one_in(4, HOW), ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one(pool: WorkerPool, tmp_path: Path, kwargs: dict[str, Any]) -> None:
    whole = pool.run(uninterrupted, 2, tmp_path, **kwargs)
    saved = sorted(tmp_path.glob("*.ckpt"), key=lambda path: (int(path.stem.split("=")[1]), path.stem))
    assert len(saved) >= 18
    steps = [int(key.split()[1]) for key in whole[0][0]]
    chosen = saved[:: 2 if not kwargs else 3]
    for rank, results in enumerate(pool.run(each_resumed, 2, chosen, **kwargs)):
        expected = whole[rank]
        for path, (record, weights, buffers, ends, lrs) in zip(chosen, results, strict=True):
            at = int(path.stem.split("=")[1])
            missing = {key for key in expected[0] if int(key.split()[1]) > at} - set(record)
            assert not missing, (path.name, missing)
            for key, value in record.items():
                assert value == expected[0][key], (path.name, rank, key)
            for ours, theirs in ((weights, expected[1]), (buffers, expected[2])):
                for name, value in ours.items():
                    np.testing.assert_array_equal(value, theirs[name], f"{path.name} {name}")
            assert lrs == expected[4], path.name
            is_epoch_done = path.stem.startswith("epoch") or ("max_steps" in kwargs and at == max(steps))
            assert ends == expected[3][at // 5 + is_epoch_done :], path.name


class BeforeEpoch(pl.Callback):
    """Save before the first batch of the second epoch is fetched, as a run does that is asked to stop there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_saved = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        around_every_batch(trainer, "save", lambda: self.save(trainer))

    def save(self, trainer: pl.Trainer) -> None:
        if trainer.current_epoch == 1 and not self.has_saved:
            self.has_saved = True
            trainer.save_checkpoint(self.path)


def saving_before_an_epoch(path: Path) -> Any:
    return fit([BeforeEpoch(path)])


def test_a_run_that_stops_before_the_first_batch_of_an_epoch_resumes_with_this_epoch(
    pool: WorkerPool, tmp_path: Path
) -> None:
    whole = pool.run(saving_before_an_epoch, 2, tmp_path / "saved")
    for rank, (record, *_) in enumerate(pool.run(resumed, 2, tmp_path / "saved")):
        expected = whole[rank][0]
        assert record == {key: expected[key] for key in record}
        assert {key for key in expected if int(key.split()[1]) >= 5} == set(record)


def indices(path: Path) -> dict[str, list[int]]:
    """Train with a stateful loader, save everywhere, and return the indices of the samples of each step."""
    record = fit([Everywhere(path)], model=Regression(stateful=True))[0]
    return {key: value[1] for key, value in record.items() if key.startswith("train")}


def indices_resumed(path: Path) -> dict[str, list[int]]:
    record = fit([], path, model=Regression(stateful=True))[0]
    return {key: value[1] for key, value in record.items() if key.startswith("train")}


def indices_of_each(paths: list[Path]) -> list[dict[str, list[int]]]:
    return [indices_resumed(path) for path in paths]


def test_stateful_loaders_continue_at_their_place(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(indices, 2, tmp_path)
    names = ("batch=2", "batch=6", "batch=9", "epoch=9")
    for rank, results in enumerate(pool.run(indices_of_each, 2, [tmp_path / f"{name}.ckpt" for name in names])):
        for name, seen in zip(names, results, strict=True):
            at = int(name.split("=")[1])
            assert seen == {key: value for key, value in whole[rank].items() if int(key.split()[1]) > at}, name
            assert seen


def test_resuming_a_stateful_loader_on_another_number_of_ranks_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(indices, 2, tmp_path)
    with pytest.raises(RankFailed, match="cannot be divided among other ranks"):
        pool.run(indices_resumed, 1, tmp_path / "batch=6.ckpt")


GLOBAL_BATCH, NUM_STEPS = 12, 8


class Counted(pl.LightningModule):
    """Train without random numbers, so that any number of ranks computes the same up to rounding."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
        self.batch_size = batch_size
        self.seen: dict[int, list[int]] = {}
        self.at_start: Any = None

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(GLOBAL_BATCH * NUM_STEPS), batch_size=self.batch_size, shuffle=True)

    def on_train_start(self) -> None:
        self.at_start = whole_state(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        index, _ = batch
        x = torch.sin(index[:, None] * torch.arange(1.0, 7.0, dtype=torch.float64))
        self.seen.setdefault(self.global_step, []).extend(index.tolist())
        return functional.mse_loss(self.net(x)[:, 0], x.sum(1))

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0  # Lightning makes the loader for that.
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def whole_state(module: pl.LightningModule) -> dict[str, np.ndarray]:
    """Return the whole weights and the whole state of the optimizer."""
    state = {name: weight.numpy().copy() for name, weight in whole_parameters(module).items()}
    optimizer = module.optimizers().optimizer
    for name, param in module.named_parameters():
        for key, value in optimizer.state[param].items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[f"{name}.{key}"] = whole.detach().cpu().numpy().copy()
    return state


def some_steps(
    num_steps: int,
    save_to: Path | None = None,
    ckpt_path: Path | None = None,
    batch_size: int | None = None,
    schedule: dict[int, int] | None = None,
) -> Any:
    torch.manual_seed(0)
    model = Counted(batch_size or GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]))
    callbacks = [GradientAccumulationScheduler(schedule)] if schedule else []
    arguments = {"use_distributed_sampler": True, "max_steps": num_steps, "precision": "64-true"}
    trainer = make_trainer("full_shard", callbacks=callbacks, **arguments)
    trainer.fit(model, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return model.seen, model.at_start, whole_state(model)


@pytest.mark.parametrize("batch_size", [None, 3], ids=["divided by the user", "given for each rank"])
def test_every_sample_is_seen_once_when_the_number_of_ranks_changes(
    pool: WorkerPool, tmp_path: Path, batch_size: int | None
) -> None:
    seen: dict[int, list[int]] = {}
    before, path = None, None
    for step, num_ranks in ((2, 4), (4, 2), (6, 3), (8, 1)):
        results = pool.run(some_steps, num_ranks, step, tmp_path / f"{step}.ckpt", path, batch_size)
        path = tmp_path / f"{step}.ckpt"
        for rank_seen, at_start, _ in results:
            for key, indices in rank_seen.items():
                seen.setdefault(key, []).extend(indices)
            if before is not None:
                assert before.keys() == at_start.keys()
                for name, value in before.items():
                    np.testing.assert_array_equal(at_start[name], value, name)
        before = results[0][2]
    assert all(len(indices) == GLOBAL_BATCH for indices in seen.values())
    assert sorted(index for indices in seen.values() for index in indices) == list(range(GLOBAL_BATCH * NUM_STEPS))
    one_seen, _, one = pool.run(some_steps, 1, NUM_STEPS)[0]
    assert {key: sorted(indices) for key, indices in seen.items()} == {k: sorted(v) for k, v in one_seen.items()}
    for name, value in one.items():
        np.testing.assert_allclose(before[name], value, rtol=1e-10, atol=1e-14)


def test_resuming_on_ranks_that_cannot_share_a_steps_samples_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(some_steps, 2, 2, tmp_path / "2.ckpt", None, 5)
    with pytest.raises(RankFailed, match="takes 10 samples, which 3 ranks cannot share"):
        pool.run(some_steps, 3, 4, None, tmp_path / "2.ckpt", 5)


def test_a_schedule_of_accumulation_is_resumed_within_an_epoch(pool: WorkerPool, tmp_path: Path) -> None:
    schedule = {0: 2, 5: 3}
    whole = pool.run(some_steps, 2, 8, None, None, 3, schedule)
    pool.run(some_steps, 2, 2, tmp_path / "2.ckpt", None, 3, schedule)
    for (seen, _, _), (resumed_seen, _, _) in zip(
        whole, pool.run(some_steps, 2, 8, None, tmp_path / "2.ckpt", 3, schedule), strict=True
    ):
        assert resumed_seen == {step: indices for step, indices in seen.items() if step >= 2}


class TwoOptimizers(Regression):
    """Train by manual optimization with two optimizers in turn, one of which (SGD without momentum) has no state."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        self.optimizers()[batch_idx % 2].step()
        return loss

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net[0].parameters(), lr=0.01),
            torch.optim.SGD(self.net[4].parameters(), lr=0.01),
        ]


def averaged() -> Any:
    return EMAWeightAveraging(decay=0.8)


def each_special(name: str, paths: list[Path]) -> list[Any]:
    return [special(None, name, path) for path in paths]


def special(folder: Path | None, name: str, path: Path | None = None) -> Any:
    """Train with a weight average or with two optimizers.

    Args:
        folder: Folder to save everywhere in; None: do not save.
        name: ``"average"`` or ``"two optimizers"``.
        path: Checkpoint to resume from.
    """
    pl.seed_everything(0, verbose=False)
    model = TwoOptimizers() if name == "two optimizers" else Regression()
    callbacks = [averaged()] if name == "average" else []
    if folder is not None:
        callbacks.append(Everywhere(folder))
    return fit(callbacks, path, seed=7 if path else 0, model=model, val_check_interval=2)


@pytest.mark.parametrize("name", one_in(2, ["average", "two optimizers"]))
def test_weight_averages_and_several_optimizers_are_resumed(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    whole = pool.run(special, 2, tmp_path, name)
    places = ("batch=2", "batch=6", "validation=8", "batch=9", "epoch=9")
    for rank, results in enumerate(pool.run(each_special, 2, name, [tmp_path / f"{place}.ckpt" for place in places])):
        for where, (record, weights, buffers, _, _) in zip(places, results, strict=True):
            assert record == {key: value for key, value in whole[rank][0].items() if key in record}, where
            assert {key for key in whole[rank][0] if int(key.split()[1]) > int(where.split("=")[1])} <= set(record)
            for ours, theirs in ((weights, whole[rank][1]), (buffers, whole[rank][2])):
                for key, value in ours.items():
                    np.testing.assert_array_equal(value, theirs[key], f"{where} {key}")
