"""Test Lightning's own callbacks, except those for checkpoints, and callbacks of the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import full_parameters
from tests.behaviour.case import HOLDS_PARTS, Run, case
from tests.behaviour.models import NUM_FEATURES, Classifier, samples


class _Cosine(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


# Each name maps to (title, function that makes the callback, arguments of the Trainer).
_CALLBACKS: dict[str, tuple[str, Callable[[], Callback], dict[str, Any]]] = {
    "stopping_max": ("EarlyStopping, mode='max'", lambda: EarlyStopping("val/accuracy", mode="max", patience=1), {}),
    "stopping_threshold": (
        "EarlyStopping, stopping_threshold",
        lambda: EarlyStopping("val/loss", stopping_threshold=0.6, patience=9),
        {},
    ),
    "stopping_divergence": (
        "EarlyStopping, divergence_threshold",
        lambda: EarlyStopping("val/loss", divergence_threshold=0.5, patience=9),
        {},
    ),
    "stopping_delta": ("EarlyStopping, min_delta", lambda: EarlyStopping("val/loss", min_delta=0.2, patience=1), {}),
    "stopping_training": (
        "EarlyStopping of a training metric",
        lambda: EarlyStopping("train/loss", check_on_train_epoch_end=True, min_delta=0.4, patience=1),
        {},
    ),
    "stopping_lenient": (
        "EarlyStopping of a metric that is missing, strict=False",
        lambda: EarlyStopping("no", strict=False),
        {"max_epochs": 2},
    ),
    "rate_of_steps": (
        "LearningRateMonitor by step",
        lambda: LearningRateMonitor("step", log_momentum=True),
        {"max_epochs": 2},
    ),
    "rate_of_epochs": ("LearningRateMonitor by epoch", lambda: LearningRateMonitor("epoch"), {"max_epochs": 2}),
    "accumulation": (
        "GradientAccumulationScheduler",
        lambda: GradientAccumulationScheduler({0: 1, 1: 2, 2: 4}),
        {"max_epochs": 3},
    ),
    "stochastic_averaging": (
        "StochasticWeightAveraging",
        lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1),
        {"max_epochs": 5},
    ),
    "averaging": ("WeightAveraging", WeightAveraging, {"max_epochs": 2}),
    "ema": ("EMAWeightAveraging", lambda: EMAWeightAveraging(decay=0.8), {"max_epochs": 2}),
    "late_ema": (
        "EMAWeightAveraging from the second epoch on, every 2 steps",
        lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=2, update_starting_at_epoch=1),
        {"max_epochs": 3},
    ),
    "summary": ("ModelSummary of all depths", lambda: ModelSummary(max_depth=-1), {"max_epochs": 1}),
    "rich_summary": ("RichModelSummary", lambda: RichModelSummary(max_depth=2), {"max_epochs": 1}),
    "rich_bar": ("RichProgressBar", RichProgressBar, {"enable_progress_bar": True, "max_epochs": 2}),
    "tqdm_bar": (
        "TQDMProgressBar",
        lambda: TQDMProgressBar(refresh_rate=2),
        {"enable_progress_bar": True, "max_epochs": 2},
    ),
    "timer": ("Timer that is not over", lambda: Timer("00:01:00:00"), {"max_epochs": 2}),
    "timer_over": ("Timer that is over at once", lambda: Timer({"seconds": 0}), {}),
}

_REFUSED = {"stochastic_averaging": dict.fromkeys(HOLDS_PARTS, "StochasticWeightAveraging.*use WeightAveraging")}

for _name, (_title, _make, _options) in _CALLBACKS.items():

    @case(_title, name=f"callback_{_name}", refused=_REFUSED.get(_name, {}))
    def _(run: Run, make: Callable[[], Callback] = _make, options: dict[str, Any] = _options) -> None:
        run.fit(_Cosine().double(), val=True, callbacks=[make()], **{"max_epochs": 5, **options})


@case("EarlyStopping of a metric that is missing is Lightning's own error")
def stopping_strict(run: Run) -> None:
    run.record_error("error", lambda: run.fit(Classifier(), val=True, callbacks=[EarlyStopping("no")], observe=False))


@case("EMAWeightAveraging with ModelCheckpoint: the averaged weights are saved, validated and resumed")
def ema_with_checkpoint(run: Run) -> None:
    callbacks = [EMAWeightAveraging(decay=0.8), ModelCheckpoint(run.folder, "{epoch}", monitor="val/loss")]
    model = Classifier().double()
    trainer = run.fit(model, val=True, callbacks=callbacks, max_epochs=2, name="first")
    run.record("validated", trainer.validate(model, run.loader(), verbose=False))
    path = callbacks[1].best_model_path
    run.fit(Classifier(), val=True, callbacks=[EMAWeightAveraging(decay=0.8)], max_epochs=4, ckpt_path=path)


@case("validate(ckpt_path='best') after a fit with WeightAveraging")
def averaging_then_validate(run: Run) -> None:
    callbacks = [WeightAveraging(), ModelCheckpoint(run.folder, monitor="val/loss")]
    model = Classifier().double()
    trainer = run.fit(model, val=True, callbacks=callbacks, max_epochs=2)
    run.record("validated", trainer.validate(model, run.loader(), ckpt_path="best", verbose=False))


@case("ModelSummary with example_input_array")
def summary_with_example(run: Run) -> None:
    class WithExample(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(2, NUM_FEATURES, dtype=torch.float64)

    run.fit(WithExample(), callbacks=[ModelSummary()])


@case("LambdaCallback")
def lambda_callback(run: Run) -> None:
    seen: list[str] = []
    callback = LambdaCallback(
        on_train_epoch_start=lambda trainer, module: seen.append(f"epoch {trainer.current_epoch}"),
        on_train_batch_end=lambda trainer, module, outputs, batch, i: seen.append(f"batch {i}"),
    )
    run.fit(Classifier(), callbacks=[callback], max_epochs=2)
    run.record("seen", seen)


class _Writes(BasePredictionWriter):
    def __init__(self, folder: Path, interval: str) -> None:
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        torch.save((prediction, indices), self.folder / f"batch-{args[1]}-of-{trainer.global_rank}.pt")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        torch.save((predictions, indices), self.folder / f"epoch-of-{trainer.global_rank}.pt")


for _interval in ("batch", "epoch"):

    @case(f"BasePredictionWriter, by {_interval}", name=f"prediction_writer_{_interval}")
    def _(run: Run, interval: str = _interval) -> None:
        loader = DataLoader(samples(), 8 // run.layout.num_data_parallel)
        trainer = run.trainer(callbacks=[_Writes(run.folder, interval)], use_distributed_sampler=True)
        trainer.predict(Classifier(), loader, return_predictions=False)
        trainer.strategy.barrier()
        rows: dict[int, Any] = {}
        for path in sorted(run.folder.glob("*.pt")):
            outputs, indices = torch.load(path)
            if interval == "epoch":
                outputs, indices = torch.cat(outputs), [i for batch in indices[0] for i in batch]
            assert not set(indices) & set(rows), "a sample is written twice"
            rows.update(zip(indices, outputs, strict=True))
        run.record("written", [rows[i] for i in sorted(rows)])


@case("DeviceStatsMonitor")
def device_stats(run: Run) -> None:
    run.fit(Classifier(), callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=CSVLogger(run.folder))


@case("SpikeDetection: a loss that is suddenly too large ends the fit, and its batches are written to a file")
def spike_detection(run: Run) -> None:
    class Spikes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * 100 if batch_idx == 2 else loss

    callback = SpikeDetection(exclude_batches_path=run.folder / "skipped.json", rtol=2.0)
    run.record_error("spike", lambda: run.fit(Spikes(), callbacks=[callback], observe=False))
    run.record("batches to skip", callback.bad_batches)


@case("ThroughputMonitor")
def throughput(run: Run) -> None:
    callback = ThroughputMonitor(batch_size_fn=lambda batch: batch[0].shape[0], window_size=2)
    run.fit(Classifier(), val=True, callbacks=[callback], logger=CSVLogger(run.folder))


class _Tunable(Classifier):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run, self.batch_size, self.lr = run, 8, 0.01

    def train_dataloader(self) -> Any:
        return self._run.loader(batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return self._run.loader(batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


_STAGES = dict.fromkeys(("pp", "nd", "nd_tp"), "BatchSizeFinder with pp_size=2: .* the stages of a pipeline need")


@case("BatchSizeFinder", refused=_STAGES)
def batch_size_finder(run: Run) -> None:
    model = _Tunable(run)
    callback = BatchSizeFinder("power", steps_per_trial=1, init_val=8, max_trials=2)
    run.fit(model, callbacks=[callback])
    run.record("batch size", model.batch_size)


@case("BatchSizeFinder by binary search, with batches for which memory runs out", refused=_STAGES)
def batch_size_finder_without_memory(run: Run) -> None:
    class RunsOut(_Tunable):
        def train_dataloader(self) -> Any:
            return super().train_dataloader()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.batch_size > 24:
                raise RuntimeError("CUDA error: out of memory")
            return loss

    model = RunsOut(run)
    callback = BatchSizeFinder("binsearch", steps_per_trial=2, init_val=8, max_trials=6, margin=0.0)
    run.fit(model, callbacks=[callback])
    run.record("batch size", [model.batch_size, callback.optimal_batch_size])


@case("LearningRateFinder")
def learning_rate_finder(run: Run) -> None:
    model = _Tunable(run)
    run.fit(model, callbacks=[LearningRateFinder(1e-5, 1e-1, 24, early_stop_threshold=None)], max_steps=30)
    run.record("found", model.lr)


_HOOK = (
    "A forward hook that a callback puts on a layer is called on the ranks of the layer's stage and of later ones, and"
    " what the callback keeps is there alone. Keep it in an attribute of the module, in the step: every rank gets it."
)


@case(
    "a callback keeps features by a forward hook that it puts on a layer",
    differs={"pp": _HOOK, "nd": _HOOK, "nd_tp": _HOOK},
)
def feature_hook(run: Run) -> None:
    class Features(Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.features: list[Tensor] = []
            hook = lambda m, args, output: self.features.append(output.detach())  # noqa: E731
            self.handle = module.net[5].register_forward_hook(hook)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.handle.remove()
            if trainer.state.fn == "validate" and self.features:
                run.record("features", torch.cat(self.features), per_rank=True)

    model = Classifier().double()
    trainer = run.fit(model, val=True, callbacks=[Features()])
    trainer.validate(model, run.loader(), verbose=False)


@case(
    "a callback runs the model on samples of its own at the end of an epoch",
    refused=dict.fromkeys(HOLDS_PARTS, r"outside of a training, .* step.*lightning_dist.full_parameters\(module\)"),
)
def callback_runs_model(run: Run) -> None:
    class Samples(Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            with torch.no_grad():
                run.record("logits", module(samples(4).tensors[0]))

    run.fit(Classifier(), val=True, callbacks=[Samples()])


@case("a callback runs the model inside full_parameters at the end of an epoch")
def callback_runs_whole_model(run: Run) -> None:
    class Samples(Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            with full_parameters(module):
                run.record("logits", module(samples(4).tensors[0]))

    run.fit(Classifier(), val=True, callbacks=[Samples()])


@case("a callback with a state of its own for each weight: an average that it swaps in for validation")
def swaps_average(run: Run) -> None:
    class Swaps(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.average = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            for a, p in zip(self.average, module.parameters(), strict=True):
                a.lerp_(p.detach(), 0.3)

        def swap(self, module: nn.Module) -> None:
            for a, p in zip(self.average, module.parameters(), strict=True):
                saved = p.detach().clone()
                p.data.copy_(a)
                a.copy_(saved)

        def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
            self.swap(module)

        def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
            self.swap(module)

    run.fit(Classifier(), val=True, callbacks=[Swaps()], max_epochs=2)
