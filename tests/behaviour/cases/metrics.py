"""Test metrics of torchmetrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import (
    CatMetric,
    ClasswiseWrapper,
    MeanMetric,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    SumMetric,
)
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from tests.behaviour.case import Run, case
from tests.behaviour.models import NUM_CLASSES, Classifier


class _Margin(Metric):
    """Stand for a metric of the user, with a state that is concatenated over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("margins", default=[], dist_reduce_fx="cat")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        top = logits.topk(2, dim=1).values
        self.margins.append(top[:, 0] - top[:, 1])
        self.count += target.numel()

    def compute(self) -> Tensor:
        margins = torchmetrics.utilities.dim_zero_cat(self.margins)
        return margins.median() + margins.std() + self.count


def _collection() -> MetricCollection:
    return MetricCollection({"accuracy": MulticlassAccuracy(NUM_CLASSES), "f1": MulticlassF1Score(NUM_CLASSES)})


class _Measured(Classifier):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.train_metric, self.val_metric = make(), make()


# Each name maps to (title, function that makes the metric).
_LOGGED_AS_OBJECT: dict[str, tuple[str, Callable[[], Metric]]] = {
    "accuracy": ("accuracy", lambda: MulticlassAccuracy(NUM_CLASSES)),
    "auroc": ("AUROC, which keeps all outputs", lambda: MulticlassAUROC(NUM_CLASSES)),
    "own_metric": ("a metric of the user's own", _Margin),
}
for _name, (_title, _make) in _LOGGED_AS_OBJECT.items():

    @case(f"logged as an object: {_title}", name=f"logged_object_{_name}")
    def _(run: Run, make: Callable[[], Metric] = _make) -> None:
        class Logs(_Measured):
            def step(self, metric: Metric, name: str, batch: Any) -> Tensor:
                x, y = batch
                logits = self(x)
                metric(logits, y)
                self.log(name, metric, on_step=False, on_epoch=True)
                return functional.cross_entropy(logits, y)

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self.step(self.train_metric, "train/metric", batch)

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.step(self.val_metric, "val/metric", batch)

        run.fit(Logs(make), val=True, max_epochs=2)


# The value of a step belongs to each rank's own part of the batch, as under ddp, and so is not compared.
@case(
    "a metric's value of a step and of the epoch: on_step and on_epoch",
    reference="ddp",
    leave_out=("train/accuracy_step",),
)
def metric_on_step(run: Run) -> None:
    class Logs(_Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self(x)
            self.train_metric(logits, y)
            self.log("train/accuracy", self.train_metric, on_step=True, on_epoch=True)
            return functional.cross_entropy(logits, y)

    run.fit(Logs(lambda: MulticlassAccuracy(NUM_CLASSES)), max_epochs=2)


@case("a MetricCollection in log_dict, with a clone for validation")
def collection(run: Run) -> None:
    class Logs(_Measured):
        def __init__(self) -> None:
            super().__init__(nn.Identity)
            metrics = _collection()
            self.train_metric, self.val_metric = metrics.clone(prefix="train/"), metrics.clone(prefix="val/")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self(x)
            self.train_metric.update(logits, y)
            self.log_dict(self.train_metric, on_step=False, on_epoch=True)
            return functional.cross_entropy(logits, y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_metric.update(self(batch[0]), batch[1])
            self.log_dict(self.val_metric)

    run.fit(Logs(), val=True, max_epochs=2)


@case("a MetricCollection that is computed and reset at the epoch's end")
def collection_by_hand(run: Run) -> None:
    class Logs(_Measured):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_metric.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log_dict({f"val/{name}": value for name, value in self.val_metric.compute().items()})
            self.val_metric.reset()

    run.fit(Logs(_collection), val=True, max_epochs=2)


@case("a confusion matrix that is computed at the epoch's end")
def confusion_matrix(run: Run) -> None:
    class Logs(_Measured):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_metric.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            run.record(f"matrix {self.current_epoch}", self.val_metric.compute())
            self.val_metric.reset()

    run.fit(Logs(lambda: MulticlassConfusionMatrix(NUM_CLASSES)), val=True, max_epochs=2)


# torchmetrics sums in float32.
@case("MeanMetric and SumMetric of losses, updated in training", tolerance=1e-6)
def mean_metric(run: Run) -> None:
    class Logs(_Measured):
        def __init__(self) -> None:
            super().__init__(MeanMetric)
            self.total = SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.train_metric.update(loss.detach(), weight=len(batch[0]))
            self.total.update(len(batch[0]))
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("train/mean", self.train_metric.compute())
            self.log("train/total", self.total.compute())
            self.train_metric.reset()

    run.fit(Logs(), max_epochs=2)


@case("metrics in a ModuleDict, one for each stage")
def metrics_in_dict(run: Run) -> None:
    class Logs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = nn.ModuleDict(
                {stage: nn.ModuleList([MulticlassAccuracy(NUM_CLASSES)]) for stage in ("fit", "val")}
            )

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for metric in self.metrics["val"]:
                metric(self(batch[0]), batch[1])
                self.log("val/accuracy", metric)

    run.fit(Logs(), val=True)


@case("MinMaxMetric and ClasswiseWrapper")
def wrapped_metrics(run: Run) -> None:
    class Logs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.best = MinMaxMetric(MulticlassAccuracy(NUM_CLASSES))
            self.classwise = ClasswiseWrapper(MulticlassAccuracy(NUM_CLASSES, average=None))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch[0])
            self.best.update(logits, batch[1])
            self.classwise.update(logits, batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log_dict({**self.best.compute(), **self.classwise.compute()})
            self.classwise.reset()

    run.fit(Logs(), val=True, max_epochs=2)


@case("MetricTracker over epochs")
def metric_tracker(run: Run) -> None:
    class Logs(_Measured):
        def on_validation_epoch_start(self) -> None:
            self.val_metric.increment()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_metric.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log("val/accuracy", self.val_metric.compute())
            self.log("val/best", self.val_metric.best_metric())

    run.fit(Logs(lambda: MetricTracker(MulticlassAccuracy(NUM_CLASSES))), val=True, max_epochs=3)


@case("CatMetric joins all outputs, in whatever order of ranks")
def cat_metric(run: Run) -> None:
    class Logs(_Measured):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_metric.update(self(batch[0])[:, 0])

        def on_validation_epoch_end(self) -> None:
            run.record("values", self.val_metric.compute().sort().values)

    run.fit(Logs(CatMetric), val=True)


@case("a functional metric, logged by value")
def functional_metric(run: Run) -> None:
    class Logs(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            value = torchmetrics.functional.accuracy(self(batch[0]), batch[1], "multiclass", num_classes=NUM_CLASSES)
            self.log("val/accuracy", value, sync_dist=True)

    run.fit(Logs(), val=True)


@case("a metric of a callback")
def metric_of_callback(run: Run) -> None:
    class Measures(pl.Callback):
        def __init__(self) -> None:
            self.metric = MeanMetric()

        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            self.metric.update(outputs)

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            run.record("mean", self.metric.compute())
            self.metric.reset()

    run.fit(Classifier(), val=True, callbacks=[Measures()])


@case("a metric whose state is in the checkpoint")
def persistent_metric(run: Run) -> None:
    class Logs(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.seen = SumMetric()
            self.seen.persistent(True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.update(len(batch[0]))
            return super().training_step(batch, batch_idx)

    model = Logs()
    trainer = run.fit(model, observe=False)
    run.record("seen", model.seen.compute())
    trainer.save_checkpoint(run.folder / "a.ckpt")
    again = Logs()
    run.fit(again, ckpt_path=str(run.folder / "a.ckpt"), max_epochs=2, observe=False)
    run.record("keys", sorted(key for key in again.state_dict() if "seen" in key))


@case(
    "a loss that is the product of two means",
    reference="ddp",
    differs=dict.fromkeys(
        ("pp", "nd", "nd_tp"),
        "A pipeline takes the mean of the losses of its microbatches. It is not the loss of the batch where the loss is"
        " no mean over samples.",
    ),
)
def metric_in_loss(run: Run) -> None:
    class Uses(_Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self(x)
            return functional.cross_entropy(logits, y) * (1 + functional.mse_loss(logits, logits.detach() * 0.9))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracy of the step", self.val_metric(self(batch[0]), batch[1]), on_step=True, sync_dist=True)

    model = Uses(lambda: MulticlassAccuracy(NUM_CLASSES))
    trainer = run.fit(model)
    run.record("tested", trainer.test(model, run.loader(), verbose=False))
