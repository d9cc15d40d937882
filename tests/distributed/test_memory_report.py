"""Test the report about memory, and the advice when memory runs out, in real runs."""

from __future__ import annotations

import ctypes
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist.plugins.strategies.memory_report import MemoryReport
from tests.accelerator_rules.rows import GroupedMixture
from tests.distributed.fit import make_strategy, make_trainer
from tests.pool import RankFailed, WorkerPool

NUM_LAYERS = 8


def params_mib(dim: int, num_layers: int = NUM_LAYERS) -> float:
    return num_layers * (8 * dim**2 + 5 * dim) * 4 / 2**20


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Deep(pl.LightningModule):
    def __init__(self, dim: int = 512, num_rows: int = 2, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.dim = dim
        self.num_rows = num_rows
        self.num_layers = num_layers

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.Sequential(*(Block(self.dim) for _ in range(self.num_layers)))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.blocks(batch[0].expand(self.num_rows, -1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(16, self.dim)), batch_size=1)


class Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def fit(
    layout: str, folder: Path, make: Callable[[], pl.LightningModule] = Deep, **strategy_kwargs: Any
) -> tuple[str, dict[str, float]]:
    """Return the table and the logged metrics."""
    logger = pl.loggers.CSVLogger(folder)
    trainer = make_trainer("auto", strategy=make_strategy(layout, **strategy_kwargs), max_steps=2, logger=logger)
    logged: dict[str, float] = {}
    logger.log_metrics = lambda metrics, step=None: logged.update(metrics)  # type: ignore[method-assign]
    texts, lightning = Texts(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    lightning.addHandler(texts)
    level = lightning.level
    lightning.setLevel(logging.INFO)
    try:
        trainer.fit(make())
    finally:
        lightning.removeHandler(texts)
        lightning.setLevel(level)
    return next((text for text in texts.texts if text.startswith("memory of a rank")), ""), logged


@pytest.mark.parametrize(("layout", "num_shards"), [("full_shard", 2), ("2x1", 1)])
def test_predicted_and_measured_memory_are_reported(
    pool: WorkerPool, tmp_path: Path, layout: str, num_shards: int
) -> None:
    table, logged = pool.run(fit, 2, layout, tmp_path)[0]
    assert table.splitlines()[-1].split()[0] == "peak"
    for kind, factor in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        expected = factor * params_mib(512) / num_shards
        assert logged[f"memory/{kind}_mib"] == pytest.approx(expected, rel=0.01)
        assert logged[f"memory/{kind}_predicted_mib"] == pytest.approx(expected, rel=0.01)
    assert logged["memory/peak_predicted_mib"] < 3 * logged["memory/peak_of_model_mib"]


def test_experts_on_ranks_of_their_own_are_counted_whole(pool: WorkerPool, tmp_path: Path) -> None:

    _, logged = pool.run(fit, 2, "full_shard", tmp_path, GroupedMixture, ep_size=2)[0]
    for kind in ("parameters", "gradients", "optimizer"):
        predicted, measured = logged[f"memory/{kind}_predicted_mib"], logged[f"memory/{kind}_mib"]
        assert predicted == pytest.approx(measured, rel=0.02), kind


def test_states_in_files_are_not_counted(pool: WorkerPool, tmp_path: Path) -> None:
    _, logged = pool.run(fit, 2, "full_shard", tmp_path, offload="both", offload_folder=str(tmp_path))[0]
    assert logged["memory/optimizer_mib"] == logged["memory/parameters_mib"] == 0


M_MMAP_THRESHOLD = -3  # This is a constant of glibc's malloc.h.


@contextmanager
def limited_memory(limit_mib: int) -> Iterator[None]:
    """Let this process allocate at most ``limit_mib`` more of private memory in this context."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)  # The limit counts freed memory that the allocator keeps.
    lines = Path("/proc/self/status").read_text().splitlines()
    in_use_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use_kib * 1024 + limit_mib * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def fit_within(
    limit_mib: int, model: Callable[[], pl.LightningModule], num_steps: int = 2, **strategy_kwargs: Any
) -> None:
    """Train with at most ``limit_mib`` more of private memory than when the fit begins."""
    with limited_memory(limit_mib):
        trainer = make_trainer("auto", strategy=make_strategy("full_shard", **strategy_kwargs), max_steps=num_steps)
        trainer.fit(model())


LIMIT_MIB = 190


@pytest.mark.thorough
@pytest.mark.gloo
def test_a_model_whose_state_exceeds_the_limit_trains_with_offloading(own_pool: WorkerPool, tmp_path: Path) -> None:
    model = partial(Deep, 512, 500)
    assert 4 * params_mib(512) > LIMIT_MIB  # These are parameters, gradients and the states of AdamW.
    with pytest.raises(RankFailed) as caught:
        own_pool.run(fit_within, 2, LIMIT_MIB, model)
    assert any("activation_checkpointing='full': about" in text for text in caught.value.errors.values())
    kwargs = {"activation_checkpointing": "full", "offload": "both", "offload_folder": str(tmp_path)}
    own_pool.run(fit_within, 2, LIMIT_MIB, model, **kwargs)


class Exhausting(Deep):
    """Raise the error of a GPU's allocator in the second step, when sizes are known."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch)


def fit_on_gpu_without_memory() -> str:
    """Return the error of a run whose device is said to be a GPU, of whose allocator only the numbers are read."""
    construct = MemoryReport.__init__

    def on_gpu(self: MemoryReport, *args: Any) -> None:
        construct(self, *args[:-1], torch.device("cuda", 0))

    in_use = iter(range(2**28, 2**40, 2**28))
    with (
        mock.patch.object(MemoryReport, "__init__", on_gpu),
        mock.patch.object(torch.cuda, "memory_allocated", lambda device: next(in_use)),
        mock.patch.object(torch.cuda, "max_memory_allocated", lambda device: 2**33),
    ):
        try:
            make_trainer("auto", strategy=make_strategy("full_shard"), max_steps=2).fit(Exhausting())
        except torch.OutOfMemoryError as error:
            return str(error)
    return "no error"


def test_an_error_of_the_allocator_of_a_gpu_ends_with_settings_that_help(pool: WorkerPool) -> None:
    text = pool.run(fit_on_gpu_without_memory, 2)[0]
    assert text.startswith("CUDA out of memory.")
    assert "This rank's peak is predicted to be" in text
    assert "offload='both': about" in text and "offload_folder" not in text
    assert "activation_checkpointing='full': about" in text


def test_an_error_about_memory_ends_with_settings_that_help(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(fit_within, 2, 600, partial(Deep, 512, 40_000))
    text = next(text for text in caught.value.errors.values() if "Out of memory." in text)
    assert "activation_checkpointing='full': about" in text
    assert text.index("activation_checkpointing='full'") < text.index("offload='optimizer'")
