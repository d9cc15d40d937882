"""Test ranks whose data end at different batches, and ranks without any batch to evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from tests.behaviour.case import GLOBAL_BATCH_SIZE, Run, case
from tests.behaviour.models import Classifier, samples

_DIVIDED = ("full", "hybrid", "nd", "data", "data_tp")
"""The columns in which ranks have different parts of a batch."""


class _Stream(IterableDataset[Any]):
    """Yield this rank's parts of global batches, without a length."""

    def __init__(self, run: Run, num_batches: int, seed: int = 0) -> None:
        self._parts = run.layout.num_data_parallel
        self._part = run.data_parallel_rank
        self._num_batches = num_batches
        self._data = samples(seed=seed).tensors

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._num_batches):
            start = index * GLOBAL_BATCH_SIZE
            rows = slice(start + self._part, start + GLOBAL_BATCH_SIZE, self._parts)
            yield tuple(tensor[rows] for tensor in self._data)


class _SizedStream(_Stream):
    """Have a length that is wrong, as that of filtered data often is."""

    def __len__(self) -> int:
        return 4


def _stream(run: Run, num_batches: int, more: int = 1, kind: type[_Stream] = _Stream) -> DataLoader[Any]:
    """Make a loader that gives ``more`` further batches on the ranks with the first part of a batch."""
    has_more = run.layout.num_data_parallel > 1 and run.data_parallel_rank == 0
    return DataLoader(kind(run, num_batches + more * has_more), batch_size=None)


class _Watched(Classifier):
    """Record the hooks of a fit."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run, self._events = run, []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._events.append(f"batch {batch_idx}, last: {self.trainer.is_last_batch}, step {self.trainer.global_step}")

    def on_train_epoch_end(self) -> None:
        self._events.append(f"epoch {self.current_epoch}")

    def on_validation_end(self) -> None:
        self._events.append("validated")

    def on_fit_end(self) -> None:
        self._run.record("events", self._events)


_WHOLE: dict[str, Any] = {"limit_train_batches": None, "max_epochs": 2, "limit_val_batches": 1.0}


@case("training streams that end at different batches, with validation")
def training_streams(run: Run) -> None:
    run.fit(_Watched(run), _stream(run, 3), val=True, **_WHOLE)


@case("training streams that end at different batches while gradients are accumulated")
def accumulating_streams(run: Run) -> None:
    run.fit(_Watched(run), _stream(run, 3, more=2), **_WHOLE, accumulate_grad_batches=2)


@case("training loaders of unequal lengths")
def training_loaders(run: Run) -> None:
    parts, part = run.layout.num_data_parallel, run.data_parallel_rank
    indices = list(range(part, 24 + 8 * (parts > 1 and part == 0), parts))
    run.fit(_Watched(run), DataLoader(Subset(samples(), indices), GLOBAL_BATCH_SIZE // parts), val=True, **_WHOLE)


@case("streams that have fewer batches than their lengths say, on one rank")
def wrong_lengths(run: Run) -> None:
    run.fit(_Watched(run), _stream(run, 3, kind=_SizedStream), **_WHOLE)


@case(
    "unequal training streams, which are an error",
    strategy={"*": {"uneven_batches": "raise"}},
    refused=dict.fromkeys(_DIVIDED, "uneven_batches='raise', and the training data of ranks? .* end after 3 batches"),
)
def refused_streams(run: Run) -> None:
    run.fit(_Watched(run), _stream(run, 3), **_WHOLE)


@case(
    "a rank without any training batch",
    refused=dict.fromkeys(_DIVIDED, "The training loader of ranks? .* has no batch, and others have up to"),
)
def no_training_batch(run: Run) -> None:
    data = samples(24)
    if run.layout.num_data_parallel > 1 and run.data_parallel_rank > 0:
        data = TensorDataset(*(tensor[:0] for tensor in data.tensors))
    run.fit(_Watched(run), DataLoader(data, GLOBAL_BATCH_SIZE), **_WHOLE)


class _Iterates(_Watched):
    """Take batches from the iterator of the data, without their numbers."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, *_ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("train/loss", loss, sync_dist=True, batch_size=len(batch[0]))
        return loss


_NO_ITERATORS = dict.fromkeys(("pp", "nd", "nd_tp"), "training_step takes dataloader_iter, from which each stage")


@case("training streams of unequal lengths, from which training_step takes batches", refused=_NO_ITERATORS)
def iterated_streams(run: Run) -> None:
    run.fit(_Iterates(run), _stream(run, 3), val=True, **_WHOLE)


@case("training loaders of unequal lengths, from which training_step takes batches", refused=_NO_ITERATORS)
def iterated_loaders(run: Run) -> None:
    parts, part = run.layout.num_data_parallel, run.data_parallel_rank
    indices = list(range(part, 24 + 8 * (parts > 1 and part == 0), parts))
    run.fit(_Iterates(run), DataLoader(Subset(samples(), indices), GLOBAL_BATCH_SIZE // parts), **_WHOLE)


@case(
    "unequal training streams, from which training_step takes batches, which are an error",
    strategy={"*": {"uneven_batches": "raise"}},
    refused=dict.fromkeys(_DIVIDED, "uneven_batches='raise', and the training data of ranks? .* end after 3 batches")
    | _NO_ITERATORS,
)
def refused_iterated_streams(run: Run) -> None:
    run.fit(_Iterates(run), _stream(run, 3), **_WHOLE)


class _Skips(_Watched):
    """End each epoch before its third batch, on the ranks with the first part of the batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and self._run.data_parallel_rank == 0 else None


@case("on_train_batch_start returns -1 on some ranks, with validation")
def skipped_on_some_ranks(run: Run) -> None:
    run.fit(_Skips(run), run.loader(), val=True, **_WHOLE)


@case("on_train_batch_start returns -1 on some ranks, whose streams end at different batches")
def skipped_streams(run: Run) -> None:
    run.fit(_Skips(run), _stream(run, 3), **_WHOLE, accumulate_grad_batches=2)


@case(
    "on_train_batch_start returns -1 on some ranks, which is an error",
    strategy={"*": {"uneven_batches": "raise"}},
    refused=dict.fromkeys(
        _DIVIDED, "uneven_batches='raise', and on_train_batch_start returned -1, .* on ranks? 0.* only"
    ),
)
def refused_skips(run: Run) -> None:
    run.fit(_Skips(run), run.loader(), **_WHOLE)


class _First(Classifier):
    """Log a value for the first part of the data only."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._is_first = run.data_parallel_rank == 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self._is_first:
            self.log("val/batch", float(batch_idx), sync_dist=True, batch_size=1)
        super().validation_step(batch, batch_idx)


def _all_in_first_part(run: Run, num: int, is_sized: bool) -> Any:
    """Make a loader that gives all batches to the ranks with the first part, and none to the others."""
    has_none = run.data_parallel_rank > 0
    data = samples(0 if has_none else num, seed=3)
    if is_sized:
        return DataLoader(data, GLOBAL_BATCH_SIZE)
    return DataLoader(_Batches(() if has_none else data.tensors), batch_size=None)


class _Batches(IterableDataset[Any]):
    def __init__(self, data: tuple[Tensor, ...]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return zip(*(tensor.split(GLOBAL_BATCH_SIZE) for tensor in self._data), strict=True) if self._data else iter(())


@case("validation streams of which one rank has all batches, and others none")
def no_validation_batch_in_stream(run: Run) -> None:
    run.fit(_First(run), val=_all_in_first_part(run, 20, is_sized=False), limit_val_batches=1.0, max_epochs=2)


@case("validation loaders of which one rank has all batches, and others none, with a sanity check")
def no_validation_batch(run: Run) -> None:
    loader = _all_in_first_part(run, 20, is_sized=True)
    run.fit(_First(run), val=loader, limit_val_batches=1.0, max_epochs=2, num_sanity_val_steps=1)


@case("test and predict streams of unequal lengths")
def unequal_evaluations(run: Run) -> None:
    model, trainer = Classifier(), run.trainer(limit_test_batches=1.0, limit_predict_batches=1.0)
    trainer.fit(model, run.loader())
    run.record("tested", trainer.test(model, _all_in_first_part(run, 20, is_sized=False), verbose=False))
    predictions = trainer.predict(model, _all_in_first_part(run, 20, is_sized=False))
    if run.data_parallel_rank == 0 and predictions is not None:
        run.record("number of predictions", sum(map(len, predictions)), per_rank=True)
    assert all(torch.isfinite(rows).all() for rows in predictions or ())
