"""Test that ranks together see the samples of a training loader in the order of its sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler, WeightedRandomSampler

from tests.behaviour.case import GLOBAL_BATCH_SIZE, Run, case
from tests.behaviour.models import Classifier, samples


def _fit(run: Run, **loader: Any) -> None:
    """Fit for two epochs with Lightning's own distribution of the samples."""
    run.fit(Classifier(), _loader(run, **loader), max_epochs=2, use_distributed_sampler=True, limit_train_batches=None)


def _loader(run: Run, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(samples(), GLOBAL_BATCH_SIZE // run.layout.num_data_parallel, **kwargs)


@case("a loader with shuffle=False")
def not_shuffled(run: Run) -> None:
    _fit(run, shuffle=False)


@case("a sampler that draws with replacement by weights, with a generator of its own")
def weighted(run: Run) -> None:
    generator = torch.Generator().manual_seed(3)
    _fit(run, sampler=WeightedRandomSampler(torch.arange(64.0) + 1, 48, generator=generator))


@case("a loader with shuffle=True and a generator of its own")
def shuffled_by_a_generator(run: Run) -> None:
    _fit(run, shuffle=True, generator=torch.Generator().manual_seed(5))


class _Curriculum(Sampler[int]):
    """Begin with the easy samples, in another order in each epoch."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(7)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        yield from self._random.permutation(32 + 16 * self._epoch)[:32].tolist()


@case("a curriculum: a sampler that depends on the epoch")
def curriculum(run: Run) -> None:
    _fit(run, sampler=_Curriculum())


class _Pairs(BatchSampler):
    """Sort each batch of samples."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield sorted(batch)


@case("a batch sampler of the user's own class, around a sampler of the user's own")
def batch_sampler(run: Run) -> None:
    size = GLOBAL_BATCH_SIZE // run.layout.num_data_parallel
    batches = _Pairs(_Curriculum(), size, drop_last=False)
    loader = DataLoader(samples(), batch_sampler=batches)
    run.fit(Classifier(), loader, max_epochs=2, use_distributed_sampler=True, limit_train_batches=None)


@case("a fit with a sampler of the user's own, saved within the second epoch and resumed")
def resumed(run: Run) -> None:
    class Sees(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch[0][:, 0].clone())
            if self.trainer.global_step == 6:
                self.trainer.save_checkpoint(run.folder / "a.ckpt")

    def fit(path: Any = None) -> list[Tensor]:
        model = Sees().double()
        trainer = run.trainer(max_steps=10, use_distributed_sampler=True, limit_train_batches=None)
        trainer.fit(model, _loader(run, sampler=_Curriculum()), ckpt_path=path)
        run.record_weights(model)
        return model.seen

    seen = fit()[6:]
    if not run.is_reference:  # One process would begin the epoch again.
        seen = fit(run.folder / "a.ckpt")
    run.record("seen", torch.cat(seen), per_rank=True)
