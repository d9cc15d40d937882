"""Test the metrics that ``self.log`` passes to loggers and callbacks."""

from __future__ import annotations

import csv
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional

from tests.behaviour.case import History, Run, case
from tests.behaviour.models import Classifier, samples

# Each name maps to (title, arguments of self.log).
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "on_step_and_epoch": ("on_step and on_epoch", {"on_step": True, "on_epoch": True}),
    "on_epoch": ("on_epoch alone", {"on_step": False, "on_epoch": True}),
    "reduced_by_max": ("reduce_fx='max'", {"reduce_fx": "max", "on_epoch": True}),
    "reduced_by_min": ("reduce_fx=torch.min", {"reduce_fx": torch.min, "on_epoch": True}),
    "reduced_by_sum": ("reduce_fx='sum'", {"reduce_fx": "sum", "on_epoch": True}),
    "in_progress_bar": ("prog_bar, and no logger", {"prog_bar": True, "logger": False}),
    "of_batch_size": ("batch_size", {"batch_size": 3, "on_epoch": True}),
    "of_rank_0": ("rank_zero_only", {"rank_zero_only": True, "sync_dist": False}),
    "not_reduced": ("no sync_dist", {"sync_dist": False, "on_epoch": True}),
}

for _name, (_title, _options) in _VARIANTS.items():

    @case(f"self.log: {_title}", name=f"logged_{_name}", reference="ddp")
    def _(run: Run, options: dict[str, Any] = _options) -> None:
        class Logs(Classifier):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                loss = self.loss(batch)
                self.log("train/loss", loss, **{"sync_dist": True, **options})
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                loss = self.loss(batch)
                self.log("val/loss", loss, **{"sync_dist": True, **options})

        trainer = run.fit(
            Logs(), val=True, max_epochs=2, observe="rank_zero_only" not in options and options.get("sync_dist", True)
        )
        if trainer.is_global_zero:
            run.record("callback metrics", dict(trainer.callback_metrics), per_rank=True)
            run.record("logged metrics", dict(trainer.logged_metrics), per_rank=True)
            run.record("bar", dict(trainer.progress_bar_metrics), per_rank=True)


@case("self.log_dict of losses that are parts of the whole")
def log_dict(run: Run) -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self(x)
            losses = {"ce": functional.cross_entropy(logits, y), "norm": logits.pow(2).mean()}
            self.log_dict(losses, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
            return losses["ce"] + 0.1 * losses["norm"]

    run.fit(Logs(), max_epochs=2)


@case("self.log of Python numbers and of booleans")
def log_numbers(run: Run) -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("step", batch_idx, sync_dist=True)
            self.log("even", batch_idx % 2 == 0, sync_dist=True, on_epoch=True)
            self.log("lr", self.optimizers().param_groups[0]["lr"])
            return loss

    run.fit(Logs())


@case("several validation loaders, metrics named by loader")
def several_loaders(run: Run) -> None:
    class Logs(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val/loss", self.loss(batch), sync_dist=True)

    loaders = [run.loader(samples(seed=seed)) for seed in (1, 2)]
    model = Logs()
    trainer = run.fit(model, val=loaders)
    run.record("validated", trainer.validate(model, loaders, verbose=False))


@case("several validation loaders, add_dataloader_idx=False")
def loaders_by_own_name(run: Run) -> None:
    class Logs(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            name = ("clean", "noisy")[dataloader_idx]
            self.log(f"{name}/loss", self.loss(batch), sync_dist=True, add_dataloader_idx=False)

    run.fit(Logs(), val=[run.loader(samples(seed=seed)) for seed in (1, 2)], max_epochs=2)


@case("self.log in hooks of the module")
def log_in_hooks(run: Run) -> None:
    class Logs(Classifier):
        def on_train_start(self) -> None:
            self.log("start", 1.0)

        def on_train_epoch_start(self) -> None:
            self.log("epoch start", float(self.current_epoch))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("batch end", float(batch_idx), on_epoch=True)
            self.log("output", outputs["loss"], sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.log("epoch end", self.current_epoch * 2.0)

        def on_validation_epoch_end(self) -> None:
            self.log("val end", self.trainer.callback_metrics["val/loss"] * 2)

    run.fit(Logs(), val=True, max_epochs=2)


@case("a callback logs by pl_module.log")
def callback_logs(run: Run) -> None:
    class Logs(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("callback/loss", outputs["loss"], sync_dist=True, on_epoch=True)

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log("callback/epoch", float(trainer.current_epoch))

    run.fit(Classifier(), val=True, callbacks=[Logs()])


@case("self.logger.log_metrics and trainer.logger of a rank's own")
def direct_logging(run: Run) -> None:
    class Logs(Classifier):
        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics({"direct": 3.0 * self.global_step}, step=self.global_step)

    run.fit(Logs(), max_epochs=2)


@case("two loggers")
def two_loggers(run: Run) -> None:
    loggers = [History(), CSVLogger(run.folder)]
    trainer = run.fit(Classifier(), val=True, logger=loggers)
    if trainer.is_global_zero:
        with open(run.folder / "lightning_logs" / "version_0" / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        # One process does not log the memory of its ranks.
        logged = [{name for name in row if row[name] and not name.startswith("memory/")} for row in rows]
        run.record("rows", [sorted(names) for names in logged if names > {"step"}], per_rank=True)


@case("trainer.callback_metrics in a hook while the fit goes on")
def metrics_inside(run: Run) -> None:
    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.record(f"after {trainer.global_step}", trainer.callback_metrics["train/loss"])

    run.fit(Classifier(), callbacks=[Reads()])


@case("the loss as a Python number: self.log(loss.item())")
def log_item(run: Run) -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("train/loss", loss.item(), sync_dist=True)
            self.log("train/detached", loss.detach().cpu(), sync_dist=True)
            return loss

    run.fit(Logs())


@case("a running mean of the loss, kept in Python, is logged")
def running_loss(run: Run) -> None:
    class Logs(Classifier):
        running: float | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = float(self.trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean"))
            self.running = loss if self.running is None else 0.9 * self.running + 0.1 * loss
            self.log("running", self.running)

    run.fit(Logs())


@case("metrics under names of one key in training and validation")
def same_name(run: Run) -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.loss(batch), sync_dist=True)

    run.fit(Logs(), val=True, max_epochs=2)


@case("self.log in predict_step is Lightning's own error")
def log_in_predict(run: Run) -> None:
    class Logs(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            self.log("x", 1.0)
            return logits

    run.record_error("error", lambda: run.trainer().predict(Logs(), run.loader()))


@case("self.log of one name with other arguments is Lightning's own error")
def log_twice(run: Run) -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, on_step=False, on_epoch=True)
            return loss

    run.record_error("error", lambda: run.fit(Logs(), observe=False))


@case("weights are logged in on_train_epoch_end: norms, means and histograms")
def log_weights(run: Run) -> None:
    class Logs(Classifier):
        def on_train_epoch_end(self) -> None:
            for name, param in self.named_parameters():
                self.log(f"mean/{name}", param.mean())
                self.log(f"norm/{name}", param.norm().item())
                self.log(f"largest/{name}", param.abs().max())

    run.fit(Logs())
