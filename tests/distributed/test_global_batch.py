"""Test that a strategy sets the batch size of loaders to its global batch, prints it, and warns if it has changed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from tests.distributed.fit import make_trainer
from tests.pool import WorkerPool

DATA = TensorDataset(torch.randn(48, 4))


class Sizes(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def fit(
    layout: str,
    global_batch_size: int | None,
    save: Path | None = None,
    resume: Path | None = None,
    loader: Any = None,
    **kwargs: Any,
) -> tuple[list[int], list[str], list[str]]:
    """Train, and return the sizes of this rank's batches, the printed global batches, and the warnings about them."""
    model = Sizes()
    options = {"global_batch_size": global_batch_size} if global_batch_size is not None else {}
    trainer = make_trainer(layout, options, **{"max_steps": 2, "use_distributed_sampler": True, **kwargs})
    texts, lightning = Texts(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    lightning.addHandler(texts)
    before = lightning.level
    lightning.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, loader() if loader else DataLoader(DATA, batch_size=3), ckpt_path=resume)
            if save is not None:
                trainer.save_checkpoint(save)
                trainer.strategy.wait_for_checkpoints()
    finally:
        lightning.removeHandler(texts)
        lightning.setLevel(before)
    printed = [text for text in texts.texts if text.startswith("  batch")]
    return model.sizes, printed, [str(w.message) for w in caught if str(w.message).startswith("A step took")]


@pytest.mark.parametrize(
    ("layout", "global_batch_size", "accumulate", "sizes", "text"),
    [
        ("2x1", None, 1, [3, 3], "6 samples a step = 3 x 2 data-parallel ranks"),
        ("2x1", 8, 1, [4, 4], "8 samples a step = 4 x 2 data-parallel ranks"),
        ("1x2", 8, 2, [2] * 4, "8 samples a step = 2 x 2 accumulated x 2 data-parallel ranks"),
        ("tp2-1", 8, 1, [8, 8], "8 samples a step = 8 x 1 data-parallel ranks"),
    ],
)
def test_a_step_takes_the_global_batch_under_every_layout(
    pool: WorkerPool, layout: str, global_batch_size: int | None, accumulate: int, sizes: list[int], text: str
) -> None:
    ranks = pool.run(fit, 2, layout, global_batch_size, accumulate_grad_batches=accumulate)
    assert [found for found, *_ in ranks] == [sizes, sizes]
    assert [printed for _, printed, _ in ranks] == [[f"  batch       {text}"], []]


def test_a_run_with_another_global_batch_than_its_checkpoint_says_so(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    assert pool.run(fit, 2, "2x1", 8, save=path)[0][2] == []
    sizes, _, texts = pool.run(fit, 2, "2x1", 12, resume=path, max_steps=4)[0]
    assert sizes == [6, 6]
    (text,) = set(texts)
    assert text.startswith("A step took 8 samples when the checkpoint was saved, and takes 12 now")
    assert pool.run(fit, 1, "full_shard", 8, resume=path, max_steps=4)[0][::2] == ([8, 8], [])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield (torch.randn(4),)


def endless() -> DataLoader[Any]:
    return DataLoader(Endless(), batch_size=3)


def test_the_batch_of_an_iterable_dataset_is_set_as_well(pool: WorkerPool) -> None:
    assert [sizes for sizes, *_ in pool.run(fit, 2, "2x1", 8, loader=endless)] == [[4, 4], [4, 4]]


def of_batches() -> DataLoader[Any]:
    class Own(BatchSampler):
        pass

    return DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 3, False))


def of_tensors() -> list[Any]:
    return [[torch.randn(3, 4)] for _ in range(8)]


def refusal(**kwargs: Any) -> str:
    try:
        fit("2x1", **{"global_batch_size": 8, **kwargs})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"global_batch_size": 0}, "ValueError: global_batch_size=0 must be at least 1"),
        ({"global_batch_size": 9}, "over 2 data-parallel rank(s): use 8 or 10"),
        ({"global_batch_size": 6, "accumulate_grad_batches": 2}, "with accumulate_grad_batches=2: use 4 or 8"),
        ({"loader": of_tensors}, "with NoneType as batch_sampler) cannot be changed"),
        ({"loader": of_batches}, "divide the batch where the loader is made, by lightning_dist.per_rank_batch_size(8"),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, "with a GradientAccumulationScheduler"),
    ],
)
def test_a_global_batch_that_cannot_be_honoured_is_refused(pool: WorkerPool, kwargs: dict[str, Any], text: str) -> None:
    for error in pool.run(refusal, 2, **kwargs):
        assert text in error


class Order(Sizes):
    counts_steps_in = ""
    """Name of the hook that asks how many steps the training has, for which Lightning makes the loaders."""

    def setup(self, stage: str) -> None:
        assert self.counts_steps_in != "setup" or self.trainer.estimated_stepping_batches == 2

    def configure_optimizers(self) -> Any:
        assert self.counts_steps_in != "configure_optimizers" or self.trainer.estimated_stepping_batches == 2
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes += batch[0][:, 0].int().tolist()
        return self.layer(batch[0]).square().mean()


def order_of_samples(keeps_order: bool, counts_steps_in: str = "") -> list[list[int]]:
    pl.seed_everything(3, verbose=False)
    data, epochs = TensorDataset(torch.arange(16.0)[:, None].repeat(1, 4)), []
    for _ in range(2):
        model = Order()
        model.counts_steps_in = counts_steps_in
        kwargs = {"use_distributed_sampler": True, "max_epochs": 1}
        make_trainer("full_shard", {"keep_data_order": keeps_order}, **kwargs).fit(model, DataLoader(data, 4))
        epochs.append(model.sizes)
    return epochs


def test_the_order_of_a_loader_is_kept_or_shuffled_as_lightning_does(pool: WorkerPool) -> None:
    for rank, epochs in enumerate(pool.run(order_of_samples, 2, True)):
        assert epochs == [list(range(rank, 16, 2))] * 2
    for rank, epochs in enumerate(pool.run(order_of_samples, 2, False)):
        shuffled = DistributedSampler(range(16), num_replicas=2, rank=rank, shuffle=True, seed=3)
        assert epochs == [list(shuffled)] * 2


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers"])
def test_the_order_is_kept_where_a_hook_counts_the_steps(pool: WorkerPool, hook: str) -> None:
    for rank, epochs in enumerate(pool.run(order_of_samples, 2, True, hook)):
        assert epochs == [list(range(rank, 16, 2))] * 2
