"""Test data, loss weights, learning rates and states of the user that change in the course of training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Classifier, samples

PIPELINED = ("pp", "nd", "nd_tp")
N, C = NUM_FEATURES, NUM_CLASSES


@case("a callback changes the batch in place, more with every epoch")
def callback_changes_batch(run: Run) -> None:
    class Erases(pl.Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
        ) -> None:
            batch[0][:, : 2 * (trainer.current_epoch + 1)] = 0.0
            batch[0].add_(0.01 * batch_idx)

    run.fit(Classifier(), callbacks=[Erases()], max_epochs=2)


@case("a warm-up in optimizer_step before ReduceLROnPlateau, both seen by LearningRateMonitor, saved and resumed")
def plateau_after_warm_up(run: Run) -> None:
    class Warms(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)
            if self.trainer.global_step < 4:
                for group in optimizer.param_groups:
                    group["lr"] = min(1.0, (self.trainer.global_step + 1) / 4) * self.hparams.lr

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}

    monitor, checkpoint = LearningRateMonitor(), ModelCheckpoint(run.folder, save_last=True)
    run.fit(Warms(), val=True, callbacks=[monitor, checkpoint], max_epochs=3, name="first")
    run.record("rates", {name: list(rates) for name, rates in monitor.lrs.items()})
    run.fit(Warms(), val=True, ckpt_path=checkpoint.last_model_path, max_epochs=5, name="second")


@case("two validation loaders, each with a ModelCheckpoint of its own, and EarlyStopping of the second")
def checkpoint_of_each_loader(run: Run) -> None:
    callbacks = [
        ModelCheckpoint(
            run.folder / "a",
            "best-{epoch:02d}-{val/loss/dataloader_idx_0:.3f}",
            "val/loss/dataloader_idx_0",
            auto_insert_metric_name=False,
        ),
        ModelCheckpoint(
            run.folder / "b",
            "best-{epoch}-{step}",
            "val/accuracy/dataloader_idx_1",
            mode="max",
            save_top_k=2,
            save_weights_only=True,
        ),
        EarlyStopping("val/loss/dataloader_idx_1", patience=2),
    ]

    class Two(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    run.fit(Two(), val=[run.loader(), run.loader(samples(32, 3))], callbacks=callbacks, max_epochs=4)


@case("a block with extra state that is no tensor: get_extra_state and set_extra_state, saved and resumed")
def extra_state(run: Run) -> None:
    class Normalises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.scale = 0, 1.0
            self.linear = nn.Linear(N, N)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) / self.scale

        def get_extra_state(self) -> dict[str, Any]:
            return {"seen": self.seen, "scale": self.scale}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.seen, self.scale = state["seen"], state["scale"]

    class Extra(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[0] = Normalises()

        def on_train_epoch_end(self) -> None:
            self.net[0].seen += 1
            self.net[0].scale *= 1.5

    checkpoint = ModelCheckpoint(run.folder, save_last=True)
    run.fit(Extra(), callbacks=[checkpoint], max_epochs=2, name="first")
    model = Extra()
    run.fit(model, ckpt_path=checkpoint.last_model_path, max_epochs=3, name="second")
    run.record("state", [model.net[0].seen, model.net[0].scale])


@case("a DataModule that gives harder samples by epoch, which the module asks for the number of classes")
def harder_by_epoch(run: Run) -> None:
    class Data(pl.LightningDataModule):
        num_classes, stage = C, 0

        def setup(self, stage: str) -> None:
            self.dataset = samples()
            self.order = self.dataset.tensors[0].norm(dim=1).argsort().tolist()

        def train_dataloader(self) -> DataLoader[Any]:
            self.stage = self.trainer.current_epoch
            return run.loader(Subset(self.dataset, self.order[: 16 * (1 + self.stage)]))

        def val_dataloader(self) -> DataLoader[Any]:
            return run.loader(self.dataset)

    class Curriculum(Classifier):
        def setup(self, stage: str) -> None:
            self.head = nn.Linear(N, self.trainer.datamodule.num_classes)
            nn.init.constant_(self.head.weight, 0.01)
            nn.init.zeros_(self.head.bias)

        def on_train_epoch_end(self) -> None:
            self.log("stage", float(self.trainer.datamodule.stage))

    model = Curriculum()
    trainer = run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, limit_train_batches=None)
    trainer.fit(model, datamodule=Data())
    run.observe(trainer, model)


@case("a progress bar of the user's own, which shows other metrics")
def own_bar(run: Run) -> None:
    shown: list[Any] = []

    class Bar(TQDMProgressBar):
        def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
            items = super().get_metrics(trainer, pl_module)
            items.pop("v_num", None)
            items["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
            shown.append({name: float(value) for name, value in items.items()})
            return items

    class Shows(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, prog_bar=True, sync_dist=True)
            return loss

    run.fit(Shows(), callbacks=[Bar(leave=True)], enable_progress_bar=True)
    run.record("shown by rank 0", shown[-1:], per_rank=True)


@case(
    "metrics with states that are merged in ways of their own: Pearson, Spearman, R2, retrieval, calibration",
    tolerance=1e-6,  # torchmetrics keeps the states of some metrics in float32.
)
def correlations(run: Run) -> None:
    class Measures(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.pearson = torchmetrics.PearsonCorrCoef()
            self.spearman = torchmetrics.SpearmanCorrCoef()
            self.r2 = torchmetrics.R2Score()
            self.retrieval = torchmetrics.RetrievalMAP()
            self.calibration = torchmetrics.CalibrationError(task="multiclass", num_classes=C, n_bins=5)
            self.running = torchmetrics.aggregation.RunningMean(window=3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            value = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
            self.running(value)
            self.log("train/running", self.running, on_step=True, on_epoch=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            logits = self(x)
            found, wanted = logits[:, 0], x[:, 0]
            for metric in (self.pearson, self.spearman, self.r2):
                metric(found, wanted)
                self.log(f"val/{type(metric).__name__}", metric, on_epoch=True)
            self.calibration(logits, y)
            self.log("val/calibration", self.calibration)
            self.retrieval.update(found, y == 0, indexes=y % 2)

        def on_validation_epoch_end(self) -> None:
            self.log("val/map", self.retrieval.compute())
            self.retrieval.reset()

    run.fit(Measures(), val=True, max_epochs=2)


@case("weights of two losses from how fast each fell in past epochs (DWA), by callback_metrics")
def weights_by_past_epochs(run: Run) -> None:
    class Weighs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(N, 1)
            self.past: list[Tensor] = []
            self.register_buffer("weights", torch.ones(2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            h = self.net(x)
            losses = torch.stack(
                [functional.cross_entropy(self.head(h), y), functional.mse_loss(self.second(h)[:, 0], x.mean(1))]
            )
            names = {f"task{i}": loss for i, loss in enumerate(losses)}
            self.log_dict(names, on_step=False, on_epoch=True, sync_dist=True)
            return (self.weights * losses).sum()

        def on_train_epoch_end(self) -> None:
            metrics = self.trainer.callback_metrics
            self.past.append(torch.stack([metrics["task0"], metrics["task1"]]))
            if len(self.past) > 1:
                self.weights = 2 * (self.past[-1] / self.past[-2] / 0.5).softmax(0)

    run.fit(Weighs(), max_epochs=4)


@case("batches of alternating tasks, named in the batch, each with a head of its own in a ModuleDict")
def alternating_tasks(run: Run) -> None:
    class Tasks(Classifier):
        def __init__(self) -> None:
            super().__init__(optimizer="adamw")
            self.heads = nn.ModuleDict({"parity": nn.Linear(N, 2), "sum": nn.Linear(N, 1)})

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            task = batch["task"][0]
            out = self.heads[task](self.net(batch["x"]))
            if task == "parity":
                loss = functional.cross_entropy(out, batch["y"] % 2)
            else:
                loss = functional.mse_loss(out.squeeze(-1), batch["x"].sum(-1) / 4)
            self.log(f"{task}/loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch["x"]))
            return loss

    def collate(rows: list[tuple[Tensor, ...]]) -> dict[str, Any]:
        x, y, index = (torch.stack(column) for column in zip(*rows, strict=True))
        return {"x": x, "y": y, "task": ["parity" if int(i) // 8 % 2 else "sum" for i in index]}

    data = TensorDataset(*samples().tensors, torch.arange(64))
    run.fit(Tasks(), run.loader(data, collate_fn=collate), max_epochs=2)
