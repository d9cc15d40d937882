"""Test loops: accumulation, runs resumed here and on another layout, manual optimization, ends, and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist import FullShardStrategy, TensorParallelStrategy
from tests.behaviour.case import Run, case
from tests.behaviour.models import VOCABULARY, tokens
from tests.behaviour.writers import Writer, momentum

STAGES = ("pp", "nd", "nd_tp")

TOLERANCE = 1e-7  # Lightning stores learning rates and losses of schedules in float32.


def _fit(run: Run, model: Writer, **kwargs: Any) -> Any:
    return run.fit(model, run.loader(tokens()), val=run.loader(tokens(seed=1)), **kwargs)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


class _Scheduled(Writer):
    """Train with a warm-up and a schedule by steps."""

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _other_strategy(run: Run) -> Any:
    """Return the strategy of another layout for as many ranks, with the same parts of the batch."""
    if run.is_reference:
        return run.make_strategy()
    if run.layout.num_data_parallel == 1:
        return TensorParallelStrategy(tp_size=run.layout.world_size)
    if run.layout.num_data_parallel < run.layout.world_size:
        return run.make_strategy()
    return FullShardStrategy(zero_stage=2, offload="optimizer")


@case(
    "saved within an epoch, with clipping and a schedule, and resumed on another layout, and back again",
    tolerance=TOLERANCE,
)
def to_another_layout(run: Run) -> None:
    kwargs: dict[str, Any] = {"gradient_clip_val": 0.3, "limit_train_batches": 8}
    path = None
    for index, steps in enumerate((3, 6, 9)):
        torch.manual_seed(index)
        strategy = _other_strategy(run) if index == 1 else run.make_strategy()
        model = _Scheduled(adamw, tied=True)
        trainer = run.fit(
            model, run.loader(tokens()), ckpt_path=path, max_steps=steps, strategy=strategy, name=f"{steps}", **kwargs
        )
        path = str(run.folder / f"{index}.ckpt")
        trainer.save_checkpoint(path)
        run.record_checkpoint(path, f"checkpoint {index}")


@case("accumulation that changes by epoch, a smaller last batch, and a schedule by steps", tolerance=TOLERANCE)
def accumulation_by_epoch(run: Run) -> None:
    callback = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
    loader = run.loader(tokens(28), batch_size=8)
    run.fit(_Scheduled(), loader, callbacks=[callback], max_epochs=3, limit_train_batches=1.0)


@case(
    "manual optimization: experts and the rest have an optimizer each, clipped, accumulated over two batches",
    tolerance=TOLERANCE,
)
def two_optimizers(run: Run) -> None:
    class Two(Writer):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            experts, rest = self.optimizers()
            self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2:
                for optimizer in (experts, rest):
                    self.clip_gradients(optimizer, 0.2, "norm")
                    optimizer.step()
                    optimizer.zero_grad()
                self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            experts = adamw([p for n, p in self.named_parameters() if ".experts." in n])
            rest = momentum([p for n, p in self.named_parameters() if ".experts." not in n])
            return [experts, rest], [torch.optim.lr_scheduler.ExponentialLR(rest, 0.5)]

    _fit(run, Two())


@case("manual optimization: the embedding is disturbed along its gradient, and restored (FGM)", tolerance=TOLERANCE)
def adversarial(run: Run) -> None:
    class Disturbs(Writer):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            with torch.no_grad():
                kept = self.emb.weight.clone()
                self.emb.weight.add_(0.1 * self.emb.weight.grad / self.emb.weight.grad.norm())
            self.manual_backward(self.loss(batch))
            with torch.no_grad():
                self.emb.weight.copy_(kept)
            optimizer.step()
            optimizer.zero_grad()

    _fit(run, Disturbs())


@case(
    "two passes in a step: a target without gradient from the reversed sequence",
    tolerance=TOLERANCE,
    refused=dict.fromkeys(STAGES, "The step calls layers.0 3 times"),
)
def two_passes(run: Run) -> None:
    class Twice(Writer):
        def loss(self, batch: Any) -> Tensor:
            with torch.no_grad():
                target = self.hidden(batch[0].flip(1)).mean(1)
            return super().loss(batch) + (self.hidden(batch[0]).mean(1) - target).square().mean()

    _fit(run, Twice())


@case(
    "EarlyStopping and ReduceLROnPlateau by a torchmetric of validation; the best is tested and predicts",
    tolerance=TOLERANCE,
)
def early_stopping(run: Run) -> None:
    class Measures(Writer):
        def __init__(self) -> None:
            super().__init__(adamw)
            self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
            self.mean = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            ids = batch[0]
            logits = self(ids)[:, :-1]
            self.accuracy.update(logits.flatten(0, 1), ids[:, 1:].flatten())
            self.mean.update(functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:]).float())
            self.log("val/accuracy", self.accuracy)
            self.log("val/mean", self.mean)

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.parameters())
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/mean"}}

    best = ModelCheckpoint(run.folder, monitor="val/mean")
    stop = EarlyStopping("val/mean", patience=1)
    trainer = _fit(run, Measures(), callbacks=[best, stop], max_epochs=4)
    predictions = trainer.predict(dataloaders=run.loader(tokens(16, 7)), ckpt_path="best")
    run.record_predictions(predictions)


@case(
    "an IterableDataset without length and a loader in a CombinedLoader, with two losses, validated every 3 batches",
    tolerance=TOLERANCE,
)
def combined(run: Run) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            data = tokens(40, 8)
            for index in range(run.data_parallel_rank, 40, run.layout.num_data_parallel):
                yield data[index][0]

    class Joins(Writer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            a, b = batch["a"][0], batch["b"]
            logits = self(torch.cat([a, b]))
            first, second = logits.split([len(a), len(b)])
            loss = functional.cross_entropy(first[:, :-1].transpose(1, 2), a[:, 1:])
            return loss + 0.5 * functional.cross_entropy(second[:, 1:].transpose(1, 2), b[:, :-1])

    parts = run.layout.num_data_parallel
    loaders = {"a": run.loader(tokens()), "b": DataLoader(Stream(), batch_size=8 // parts)}
    loader = CombinedLoader(loaders, "max_size_cycle")
    val = run.loader(tokens(seed=1))
    run.fit(Joins(), loader, val=val, val_check_interval=3, limit_train_batches=7, max_epochs=2)


@case("a callback interrupts training, the module is saved, and another Trainer goes on", tolerance=TOLERANCE)
def interrupted(run: Run) -> None:
    class Raises(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                raise RuntimeError("on purpose")

    trainer = run.trainer(callbacks=[Raises()], max_epochs=2)
    run.record_error("error", lambda: trainer.fit(Writer(adamw), run.loader(tokens())))
    trainer.save_checkpoint(run.folder / "stopped.ckpt")
    _fit(run, Writer(adamw), ckpt_path=str(run.folder / "stopped.ckpt"), max_epochs=2)
