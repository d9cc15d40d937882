"""Test batches, loaders and datasets of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_FEATURES, Classifier, samples


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class _Data:
    x: Tensor
    y: Tensor
    name: str = "data"


class _Own:
    """Hold a batch in a class of the user's, like those of PyTorch Geometric."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, *args: Any, **kwargs: Any) -> _Own:
        return _Own(self.x.to(*args, **kwargs), self.y.to(*args, **kwargs))


def _stack(items: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


# Each name maps to (title, function that makes the batch, function by which the step gets features and labels).
_BATCHES: dict[str, tuple[str, Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "dict": ("a dictionary", lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "nested": (
        "nested dictionaries and lists",
        lambda x, y: {"in": [x, {"z": x * 0}], "y": (y,)},
        lambda b: (b["in"][0] + b["in"][1]["z"], b["y"][0]),
    ),
    "named_tuple": ("a NamedTuple", _Pair, lambda b: (b.x, b.y)),
    "dataclass": ("a dataclass", _Data, lambda b: (b.x, b.y)),
    "own_class": ("a class of the user's own", _Own, lambda b: (b.x, b.y)),
    "with_strings": (
        "a dictionary with strings",
        lambda x, y: {"x": x, "y": y, "id": [f"s{int(i)}" for i in y]},
        lambda b: (b["x"], b["y"]),
    ),
    "with_none": (
        "a dictionary with None",
        lambda x, y: {"x": x, "y": y, "mask": None},
        lambda b: (b["x"] if b["mask"] is None else None, b["y"]),
    ),
    "with_numbers": (
        "a dictionary with numbers",
        lambda x, y: {"x": x, "y": y, "scale": 0.5},
        lambda b: (b["x"] * b["scale"], b["y"]),
    ),
    "constant": (
        "a tensor that is not of the batch: the same for all samples",
        lambda x, y: (x, y, torch.arange(NUM_FEATURES) / 8.0),
        lambda b: (b[0] * b[2], b[1]),
    ),
    "list_of_samples": ("a list of samples", lambda x, y: list(zip(x, y, strict=True)), _stack),
    "transposed": (
        "features with the batch in their second dimension",
        lambda x, y: (x.T.contiguous(), y),
        lambda b: (b[0].T, b[1]),
    ),
}

_NO_DIMENSION_OF_SAMPLES = r"splits every tensor of a batch into microbatches along dimension 0"
_REFUSED = {
    "own_class": "finds no samples to split into microbatches.*give its class __len__",
    "constant": _NO_DIMENSION_OF_SAMPLES,
    "transposed": _NO_DIMENSION_OF_SAMPLES,
}
for _name, (_title, _make, _take) in _BATCHES.items():
    _refused = dict.fromkeys(("pp", "nd", "nd_tp"), _REFUSED[_name]) if _name in _REFUSED else {}

    @case(f"a batch is {_title}", name=f"batch_{_name}", refused=_refused)
    def _(run: Run, make: Callable[..., Any] = _make, take: Callable[[Any], Any] = _take) -> None:
        class Takes(Classifier):
            def loss(self, batch: Any) -> Tensor:
                x, y = take(batch)
                return functional.cross_entropy(self(x), y)

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("val/loss", self.loss(batch), sync_dist=True, batch_size=8 // run.layout.num_data_parallel)

        loader = run.loader(collate_fn=lambda items: make(*_stack(items)))
        run.fit(Takes(), loader, val=loader)


@case("a batch is one tensor")
def batch_tensor(run: Run) -> None:
    class Reconstructs(Classifier):
        def loss(self, batch: Any) -> Tensor:
            return functional.mse_loss(self.net(batch), batch) + self.head(batch).pow(2).mean()

    x = samples().tensors[0]
    run.fit(Reconstructs(), DataLoader(_Part(x, run), 8 // run.layout.num_data_parallel))


class _Part(Dataset[Tensor]):
    """Return this rank's rows of a tensor."""

    def __init__(self, x: Tensor, run: Run) -> None:
        self.x = x[run.data_parallel_rank :: run.layout.num_data_parallel]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class _Stream(IterableDataset[Any]):
    """Yield this rank's samples."""

    def __init__(self, run: Run, num: int = 64) -> None:
        self.part, self.parts, self.num = run.data_parallel_rank, run.layout.num_data_parallel, num

    def __iter__(self) -> Iterator[Any]:
        for index, sample in enumerate(samples(self.num)):
            if index % self.parts == self.part:
                yield sample


@case("an IterableDataset without a length")
def iterable(run: Run) -> None:
    loader = DataLoader(_Stream(run), 8 // run.layout.num_data_parallel)
    run.fit(Classifier(), loader, val=loader, max_epochs=2, limit_train_batches=None, limit_val_batches=None)


@case("an IterableDataset, validated every 3 batches")
def iterable_validated(run: Run) -> None:
    loader = DataLoader(_Stream(run), 8 // run.layout.num_data_parallel)
    run.fit(Classifier(), loader, val=loader, limit_train_batches=None, val_check_interval=3)


@case("a generator of batches in place of a loader")
def generator(run: Run) -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            yield from run.loader()

    run.fit(Classifier(), Batches(), max_epochs=2, limit_train_batches=3)


for _mode in ("max_size_cycle", "min_size", "max_size"):

    @case(f"CombinedLoader, {_mode}", name=f"combined_{_mode}")
    def _(run: Run, mode: str = _mode) -> None:
        class Combines(Classifier):
            def loss(self, batch: Any) -> Tensor:
                both = [part for part in batch.values() if part is not None]
                return sum(super(Combines, self).loss(part) for part in both[:1]) * len(both)  # type: ignore[return-value]

        loaders = {"a": run.loader(samples(24)), "b": run.loader(samples(40, seed=1))}
        run.fit(Combines(), CombinedLoader(loaders, mode), max_epochs=2, limit_train_batches=None)


@case("a dictionary of training loaders, joined in the step")
def dictionary_of_loaders(run: Run) -> None:
    class Joins(Classifier):
        def loss(self, batch: Any) -> Tensor:
            x = torch.cat([batch["labeled"][0], batch["other"][0]])
            logits = self(x)
            labeled = logits[: len(batch["labeled"][0])]
            return functional.cross_entropy(labeled, batch["labeled"][1]) + 0.1 * logits.pow(2).mean()

    run.fit(Joins(), {"labeled": run.loader(), "other": run.loader(samples(seed=3))})


@case("several test and predict loaders")
def several_evaluation_loaders(run: Run) -> None:
    class Logs(Classifier):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("test/loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            return self(batch[0]) + dataloader_idx

    loaders = [run.loader(samples(16, seed=seed)) for seed in (1, 2)]
    model, trainer = Logs(), run.trainer()
    run.record("tested", trainer.test(model, loaders, verbose=False))
    predictions = trainer.predict(model, loaders)
    run.record("loaders", None if predictions is None else len(predictions), per_rank=True)
    for index, rows in enumerate(predictions or ()):
        run.record_predictions(rows, f"predictions {index}")


@case("a last batch that is smaller")
def last_batch_smaller(run: Run) -> None:
    run.fit(Classifier(), run.loader(samples(20)), val=run.loader(samples(20)), max_epochs=2, limit_val_batches=1.0)


@case("a last batch that is smaller, with drop_last")
def drop_last(run: Run) -> None:
    loader = run.loader(samples(20), drop_last=True)
    run.fit(Classifier(), loader, val=loader, max_epochs=2, limit_val_batches=1.0)


@case("batches of another length in every step")
def batches_of_other_lengths(run: Run) -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            for index, (x, y) in enumerate(run.loader()):
                yield x[:, None, :].repeat(1, 1 + index % 3, 1), y

    class Lengths(Classifier):
        def loss(self, batch: Any) -> Tensor:
            return functional.cross_entropy(self(batch[0]).mean(1), batch[1])

    run.fit(Lengths(), Batches())


@case("the step makes hidden states of another length in every step")
def other_lengths(run: Run) -> None:
    class Lengths(Classifier):
        def loss(self, batch: Any) -> Tensor:
            length = 1 + self.trainer.global_step % 3
            h = self.net(batch[0][:, None, :].expand(-1, length, -1))
            return functional.cross_entropy(self.head(h).mean(1), batch[1])

    run.fit(Lengths())


@case("a collate function that pads to the longest of the batch")
def padded(run: Run) -> None:
    def collate(items: list[Any]) -> dict[str, Tensor]:
        lengths = [3 + int(y) % 2 for _, y in items]
        rows = [x[: 4 * n].view(n, 4) for n, (x, _) in zip(lengths, items, strict=True)]
        return {
            "x": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "lengths": torch.tensor(lengths),
            "y": torch.stack([y for _, y in items]),
        }

    class Pools(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(4, NUM_FEATURES)

        def loss(self, batch: Any) -> Tensor:
            h = self.net(self.embed(batch["x"]))
            mask = (torch.arange(h.shape[1])[None] < batch["lengths"][:, None])[..., None]
            return functional.cross_entropy(self.head((h * mask).sum(1) / batch["lengths"][:, None]), batch["y"])

    run.fit(Pools(), run.loader(collate_fn=collate))


@case("a batch sampler of the user's own")
def batch_sampler(run: Run) -> None:
    indices = list(reversed(range(64)))[run.data_parallel_rank :: run.layout.num_data_parallel]
    sampler = BatchSampler(indices, 8 // run.layout.num_data_parallel, drop_last=True)
    run.fit(Classifier(), DataLoader(samples(), batch_sampler=sampler), max_epochs=2)


@case("no validation batch at all")
def empty_validation(run: Run) -> None:
    run.fit(Classifier(), val=run.loader(TensorDataset(*[t[:0] for t in samples().tensors])))


@case("a DataModule with its own state, resumed")
def datamodule_state(run: Run) -> None:
    class Counts(pl.LightningDataModule):
        epochs = 0

        def train_dataloader(self) -> Any:
            self.epochs += 1
            return run.loader(samples(seed=self.epochs))

        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.epochs = state["epochs"] + 10

    trainer = run.trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Classifier(), Counts())
    trainer.save_checkpoint(run.folder / "a.ckpt")
    data, model = Counts(), Classifier().double()
    again = run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    again.fit(model, data, ckpt_path=run.folder / "a.ckpt")
    run.observe(again, model)


@case("the module asks for trainer.train_dataloader and the number of batches")
def asks_for_loader(run: Run) -> None:
    class Asks(Classifier):
        def on_train_start(self) -> None:
            run.record("batches", [self.trainer.num_training_batches, len(self.trainer.train_dataloader)])
            run.record("samples", len(self.trainer.train_dataloader.dataset))

    run.fit(Asks(), limit_train_batches=None)


@case(
    "a batch whose tensors have gradients: inputs as leaves",
    refused=dict.fromkeys(("pp", "nd", "nd_tp"), "A tensor of the batch requires gradients"),
)
def inputs_with_gradients(run: Run) -> None:
    class Saliency(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            batch[0].requires_grad_(True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            scale = run.layout.num_data_parallel
            run.record(f"saliency {batch_idx}", batch[0].grad / scale, per_rank=True)

    run.fit(Saliency())
