"""Test options of the Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader

from tests.behaviour.case import Run, case
from tests.behaviour.models import Classifier, samples

# Each name maps to (title, arguments of the Trainer, whether it validates).
_OPTIONS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "accumulate": ("accumulate_grad_batches", {"accumulate_grad_batches": 2}, False),
    "accumulate_uneven": (
        "accumulate_grad_batches that does not divide the epoch",
        {"accumulate_grad_batches": 3, "max_epochs": 2},
        False,
    ),
    "clip_norm": ("gradient_clip_val by norm", {"gradient_clip_val": 0.1}, False),
    "clip_value": (
        "gradient_clip_val by value",
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        False,
    ),
    "clip_accumulated": (
        "gradient_clip_val with accumulated gradients",
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        False,
    ),
    "val_every_2_batches": ("val_check_interval in batches", {"val_check_interval": 2}, True),
    "val_fraction": ("val_check_interval as a fraction of the epoch", {"val_check_interval": 0.25}, True),
    "val_across_epochs": (
        "val_check_interval across epochs",
        {"val_check_interval": 6, "check_val_every_n_epoch": None, "max_epochs": 3},
        True,
    ),
    "val_every_2_epochs": ("check_val_every_n_epoch", {"check_val_every_n_epoch": 2, "max_epochs": 4}, True),
    "limit_fraction": ("limit_train_batches as a fraction", {"limit_train_batches": 0.5}, False),
    "no_limits": ("no limits", {"limit_train_batches": None, "limit_val_batches": None}, True),
    "no_validation": ("limit_val_batches=0", {"limit_val_batches": 0}, True),
    "fast_dev": ("fast_dev_run", {"fast_dev_run": True}, True),
    "fast_dev_3": ("fast_dev_run=3", {"fast_dev_run": 3}, True),
    "max_steps": ("max_steps inside an epoch", {"max_steps": 6}, True),
    "no_time": ("max_time that is over at once", {"max_time": {"seconds": 0}}, False),
    "no_epochs": ("max_epochs=0", {"max_epochs": 0}, False),
    "sanity": ("num_sanity_val_steps", {"num_sanity_val_steps": 2}, True),
    "sanity_all": ("num_sanity_val_steps=-1", {"num_sanity_val_steps": -1}, True),
    "no_inference_mode": ("inference_mode=False", {"inference_mode": False}, True),
    "simple_profiler": ("profiler='simple'", {"profiler": "simple"}, True),
    "advanced_profiler": ("profiler='advanced'", {"profiler": "advanced"}, True),
    "torch_profiler": ("profiler='pytorch'", {"profiler": "pytorch"}, True),
    "benchmark": ("benchmark=True", {"benchmark": True}, False),
    "deterministic": ("deterministic=True", {"deterministic": True}, False),
    "seldom_logged": ("log_every_n_steps", {"log_every_n_steps": 3}, False),
    "barebones": ("barebones", {"barebones": True, "logger": None, "num_sanity_val_steps": 0}, False),
    "model_summary": ("enable_model_summary", {"enable_model_summary": True}, False),
    "progress_bar": ("enable_progress_bar", {"enable_progress_bar": True}, True),
}

for _name, (_title, _options, _val) in _OPTIONS.items():

    @case(_title, name=_name)
    def _(run: Run, options: dict[str, Any] = _options, val: bool = _val) -> None:
        if options.get("barebones"):
            options = {**dict.fromkeys(("log_every_n_steps", "enable_checkpointing"), None), **options}
        run.fit(Classifier(), val=True if val else None, **options)


@case("min_epochs holds EarlyStopping back")
def min_epochs(run: Run) -> None:
    stopping = EarlyStopping("train/loss", patience=1, mode="max", check_on_train_epoch_end=True)
    run.fit(Classifier(), callbacks=[stopping], max_epochs=8, min_epochs=5)
    run.record("stopped", stopping.stopped_epoch)


@case("min_steps holds trainer.should_stop back")
def min_steps(run: Run) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = True

    run.fit(Classifier(), callbacks=[Stop()], max_epochs=4, min_steps=6)


@case("max_epochs=-1, ended by trainer.should_stop")
def endless(run: Run) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 6

    run.fit(Classifier(), callbacks=[Stop()], max_epochs=-1)


class _OwnLoaders(Classifier):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run, self.calls = run, []

    def train_dataloader(self) -> Any:
        self.calls.append(f"train {self.trainer.current_epoch}")
        return self._run.loader(samples(seed=self.trainer.current_epoch))

    def val_dataloader(self) -> Any:
        self.calls.append(f"val {self.trainer.current_epoch}")
        return self._run.loader(samples(seed=10 + self.trainer.current_epoch))


@case("loaders of the module, reloaded every 2 epochs")
def reloaded_loaders(run: Run) -> None:
    model = _OwnLoaders(run)
    run.fit(model, max_epochs=4, reload_dataloaders_every_n_epochs=2)
    run.record("calls", model.calls)


@case("the sampler that Lightning puts into loaders of validation and of tests")
def distributed_sampler(run: Run) -> None:
    def loader() -> Any:
        return DataLoader(samples(), 8 // run.layout.num_data_parallel)

    model = Classifier()
    trainer = run.trainer(use_distributed_sampler=True, limit_val_batches=1.0)
    run.record("validated", trainer.validate(model, loader(), verbose=False))
    run.record("tested", trainer.test(model, loader(), verbose=False))
    run.record("batches", [trainer.num_val_batches, trainer.num_test_batches])


@case("overfit_batches")
def overfit(run: Run) -> None:
    loader = DataLoader(samples(), 8 // run.layout.num_data_parallel)
    options = {"overfit_batches": 2, "max_epochs": 3, "limit_train_batches": 1.0, "limit_val_batches": 1.0}
    run.fit(Classifier(), loader, loader, use_distributed_sampler=True, **options)


@case("the sampler that Lightning puts into a loader that shuffles: every sample once an epoch")
def distributed_sampler_shuffles(run: Run) -> None:
    class Seen(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("seen", batch[0].pow(2).sum(), on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
            return self.loss(batch)

    loader = DataLoader(samples(), 8 // run.layout.num_data_parallel, shuffle=True)
    trainer = run.fit(
        Seen(), loader, use_distributed_sampler=True, max_epochs=2, limit_train_batches=None, observe=False
    )
    run.record("seen", trainer.callback_metrics["seen"])


@case("trainer.estimated_stepping_batches in configure_optimizers")
def estimated_batches(run: Run) -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            run.record("batches", self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, int(self.trainer.estimated_stepping_batches))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    run.fit(Scheduled(), accumulate_grad_batches=2, max_epochs=3)


@case("limit_test_batches and limit_predict_batches")
def limited_evaluation(run: Run) -> None:
    model = Classifier()
    trainer = run.trainer(limit_test_batches=3, limit_predict_batches=0.25)
    run.record("test", trainer.test(model, run.loader(), verbose=False))
    run.record_predictions(trainer.predict(model, run.loader()))


@case("a step reads trainer.global_step and current_epoch: a curriculum")
def curriculum(run: Run) -> None:
    class Curriculum(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * (1 + 0.5 * self.current_epoch + 0.1 * self.global_step + 0.01 * batch_idx)

    run.fit(Curriculum(), max_epochs=2)


@case("trainer.is_last_batch and trainer.should_stop in a step")
def last_batch(run: Run) -> None:
    class Last(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return 2 * loss if self.trainer.is_last_batch else loss

    run.fit(Last(), max_epochs=2)


@case(
    "the strategy's own choice of everything, such as the number of microbatches",
    strategy={column: {"num_microbatches": None} for column in ("pp", "nd", "nd_tp")},
)
def own_choice(run: Run) -> None:
    run.fit(Classifier(), val=True)
