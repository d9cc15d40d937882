"""Test that ranks that split layers get the same data, and the same random numbers wherever they must agree."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dist import TensorParallelStrategy
from tests.distributed.fit import make_trainer, weights_of
from tests.models import GPT
from tests.pool import WorkerPool
from tests.split_models import LanguageModel


class KeptDropout(nn.Dropout):
    """Keep the last mask; a hook that does so would keep the layers around it whole."""

    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.mask = result.detach() == 0
        return result


class Block(nn.Module):
    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 40), nn.Linear(40, dim)
        self.hidden, self.residual = KeptDropout(0.5), KeptDropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.residual(self.down(self.hidden(functional.gelu(self.up(self.norm(x))))))


class Dropping(LanguageModel):
    """Apply dropout to features that are split over ranks, and to hidden states.

    Ranks have the same hidden states, or with sequence parallelism those of different tokens.
    """

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 24), *(Block() for _ in range(2)), nn.Linear(24, 32, bias=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=4, shuffle=True)


def dropped(sequence_parallel: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Train, and return the last mask of each dropout layer, and the final weights."""
    torch.manual_seed(int(os.environ["RANK"]))  # A user may seed the ranks differently.
    model = Dropping()
    strategy = TensorParallelStrategy(2, sequence_parallel=sequence_parallel)
    make_trainer("2x2", strategy=strategy, max_steps=3).fit(model)
    dropouts = {name: module for name, module in model.named_modules() if isinstance(module, KeptDropout)}
    return {name: module.mask.cpu().numpy() for name, module in dropouts.items()}, weights_of(model)


def test_dropout_agrees_on_ranks_with_the_same_activations_and_differs_on_others(pool: WorkerPool) -> None:
    for sequence_parallel in (False, True):
        results = pool.run(dropped, 4, sequence_parallel)
        for first, second in ((0, 1), (2, 3)):
            for name, mask in results[first][0].items():
                other = results[second][0][name]
                is_alike = mask.shape == other.shape and (mask == other).all()
                assert mask.shape[-1] == (20 if name.endswith("hidden") else 24)
                assert is_alike == (name.endswith("residual") and not sequence_parallel), name
        assert (results[0][0]["model.1.hidden"] != results[2][0]["model.1.hidden"]).any()
        for _, weights in results[1:]:
            for name, weight in weights.items():
                np.testing.assert_array_equal(weight, results[0][1][name])


class Augmented(Dataset[Any]):
    """Return samples with random numbers from the generators of Python, NumPy and torch."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = [random.randrange(32), int(np.random.randint(32)), int(torch.randint(32, ()))]
        tokens = torch.tensor([index % 32, *numbers, *[0] * 4])
        return tokens, tokens


class OnAugmented(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def train_dataloader(self) -> Any:
        return DataLoader(Augmented(), batch_size=4, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0])
        return super().training_step(batch, batch_idx)


def augmented() -> tuple[np.ndarray, int]:
    """Train, and return the batches of this rank, and the rank by which Lightning seeds its data loader workers."""
    seeds = {name: os.environ.pop(name, None) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    pl.seed_everything(int(os.environ["RANK"]), workers=True, verbose=False)
    model = OnAugmented()
    trainer = make_trainer(
        "2x2", strategy=TensorParallelStrategy(2, strict_plan=False), max_steps=3, use_distributed_sampler=True
    )
    trainer.fit(model)
    loader: Any = trainer.train_dataloader
    for name, value in seeds.items():
        os.environ.pop(name)
        os.environ.update({name: value} if value else {})
    return torch.cat(model.seen).cpu().numpy(), loader.worker_init_fn.keywords["rank"]


def test_ranks_that_split_layers_get_the_same_augmented_data(pool: WorkerPool) -> None:
    seen, numbers = zip(*pool.run(augmented, 4), strict=True)
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[2], seen[3])
    assert (seen[0][:, 1:4] != seen[2][:, 1:4]).any()
    assert numbers == (0, 0, 1, 1)


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch")
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        (self.folder / f"{trainer.global_rank}-{args[1]}").touch()


class Counting(GPT):
    """Count samples by a metric and by a logged sum."""

    num_samples = 16

    def __init__(self) -> None:
        super().__init__()
        self.total = torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.total(len(batch[0]))
        self.log("metric", self.total)
        self.log("sum", float(len(batch[0])), reduce_fx="sum", sync_dist=True)


def counted() -> tuple[float, float]:
    metrics = make_trainer(
        "2x2", strategy=TensorParallelStrategy(2, strict_plan=False), limit_val_batches=1.0
    ).validate(Counting(), verbose=False)[0]
    return metrics["metric"], metrics["sum"]


def test_ranks_that_split_layers_count_each_sample_once(pool: WorkerPool) -> None:
    assert pool.run(counted, 4) == [(16.0, 16.0)] * 4


class Predicting(GPT):
    num_samples = 16


def predicted(folder: Path) -> int:
    """Return the number of samples for which this rank returns predictions."""
    model = Predicting()
    trainer = make_trainer("2x2", strategy=TensorParallelStrategy(2, strict_plan=False), callbacks=[Writer(folder)])
    batches = trainer.predict(model) or []
    assert any(isinstance(callback, Writer) for callback in trainer.callbacks)
    return sum(len(batch) for batch in batches)


def test_of_the_ranks_that_split_layers_one_returns_and_writes_predictions(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(predicted, 4, tmp_path) == [8, 0, 8, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "2-0", "2-1"]


def resume(folder: Path) -> tuple[Any, Any]:
    """Train six steps with dropout, and three, a save, a resume and three more; return the weights of both."""
    whole, half, again = Dropping(), Dropping(), Dropping()
    results = []
    for model, max_steps, path in ((whole, 6, None), (half, 3, None), (again, 6, folder / "x.ckpt")):
        torch.manual_seed(5)
        for module in model.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        trainer = make_trainer(
            "2x2",
            strategy=TensorParallelStrategy(2, strict_plan=False),
            max_steps=max_steps,
            use_distributed_sampler=True,
        )
        trainer.fit(model, ckpt_path=path)
        if model is half:
            trainer.save_checkpoint(folder / "x.ckpt")
        results.append(weights_of(model))
    return results[0], results[2]


def test_a_resumed_run_with_dropout_equals_the_uninterrupted_one_bit_by_bit(pool: WorkerPool, tmp_path: Path) -> None:
    for expected, actual in pool.run(resume, 4, tmp_path):
        for name, weight in expected.items():
            np.testing.assert_array_equal(weight, actual[name])
