"""Test Lightning's features, callbacks and hooks with a model that is cut into stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    ModelSummary,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader, grad_norm
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from tests.behaviour.case import OWN_GRADIENTS, Run, case
from tests.behaviour.models import NUM_CLASSES, NUM_FEATURES, Block, Classifier

STAGES = ("pp", "nd", "nd_tp")
FOREIGN = dict.fromkeys(STAGES, r"The step calls torch\.distributed\.\w+ \(pipelines\.py:\d+")
OTHER_LOSS = dict.fromkeys(STAGES, "The loss is the mean of the microbatches' losses, which a warning says.")


class _Collections(Classifier):
    def __init__(self) -> None:
        super().__init__()
        metrics = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(NUM_CLASSES),
                "f1": MulticlassF1Score(NUM_CLASSES),
                "precision": MulticlassPrecision(NUM_CLASSES),
            }
        )
        self.of_training, self.of_validation = metrics.clone(prefix="train/"), metrics.clone(prefix="val/")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.of_training.update(logits, y)
        return functional.cross_entropy(logits, y)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.of_training.compute())
        self.of_training.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.of_validation.update(self(x), y)
        self.log_dict(self.of_validation, on_step=False, on_epoch=True)


@case("MetricCollection, in training and in validation")
def metric_collections(run: Run) -> None:
    run.fit(_Collections(), val=True, max_epochs=2)


class _NestedBatch(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0] * 2, "y": batch[1]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch["x"], batch["y"]))


@case("on_before_batch_transfer gives the batch another structure")
def hook_for_batches(run: Run) -> None:
    run.fit(_NestedBatch())


class _TwoLoaders(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch["a"][0] + batch["b"][0], batch["a"][1]))


@case("CombinedLoader of two loaders")
def combined_loader(run: Run) -> None:
    run.fit(_TwoLoaders(), train=CombinedLoader({"a": run.loader(), "b": run.loader()}, "max_size_cycle"))


class _Points:
    """Hold a batch in a class of the user."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, *args: Any, **kwargs: Any) -> _Points:
        return type(self)(self.x.to(*args, **kwargs), self.y.to(*args, **kwargs))

    @classmethod
    def of(cls, samples: list[tuple[Tensor, Tensor]]) -> _Points:
        return cls(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))


class _SlicedPoints(_Points):
    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> _SlicedPoints:
        return _SlicedPoints(self.x[index], self.y[index])


class _OfPoints(Classifier):
    def training_step(self, batch: _Points, batch_idx: int) -> Tensor:
        return self.loss((batch.x, batch.y))


class _SplitsPoints(_OfPoints):
    def split_batch(self, batch: _Points, num_microbatches: int) -> list[_Points]:
        parts = zip(batch.x.chunk(num_microbatches), batch.y.chunk(num_microbatches), strict=True)
        return [_Points(*part) for part in parts]


@case(
    "a batch of a class of the user's own", refused=dict.fromkeys(STAGES, "The batch is a _Points in which a pipeline")
)
def batch_class(run: Run) -> None:
    run.fit(_OfPoints(), train=run.loader(collate_fn=_Points.of))


@case("a batch of a class of the user's own, which can be sliced")
def batch_class_with_slices(run: Run) -> None:
    run.fit(_OfPoints(), train=run.loader(collate_fn=_SlicedPoints.of))


@case("a batch of a class of the user's own, which the module's split_batch splits")
def batch_class_with_hook(run: Run) -> None:
    run.fit(_SplitsPoints(), train=run.loader(collate_fn=_Points.of))


class _Gathering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("gathered", self.all_gather(loss.detach()).mean())
        return loss


@case("self.all_gather of the loss in a step")
def gather_in_step(run: Run) -> None:
    run.fit(_Gathering())


class _Calling(Classifier):
    def __init__(self, call: Callable[[Any, Tensor], Any], at: int = 0) -> None:
        super().__init__()
        self.call, self.at = call, at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == self.at and dist.is_initialized():
            self.call(self, loss.detach().clone())
        return loss


@case("torch.distributed.all_reduce over all processes in a step", refused=FOREIGN)
def all_reduce_in_step(run: Run) -> None:
    run.fit(_Calling(lambda module, loss: dist.all_reduce(loss)))


@case("a barrier in a later step", refused=FOREIGN)
def barrier_in_later_step(run: Run) -> None:
    run.fit(_Calling(lambda module, loss: module.trainer.strategy.barrier(), at=2))


class _Failing(Classifier):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "first block":
            self.net[1].register_forward_hook(lambda *args: self.fail())

    def fail(self) -> None:
        if self._trainer is not None and self.trainer.global_step == 2:
            raise ZeroDivisionError(f"planted in {self.where}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.where == "loss":
            self.fail()
        if self.where == "backward" and batch_idx == 2 and loss.requires_grad:
            loss.register_hook(lambda gradient: self.fail())
        return loss


def _fails(where: str) -> Callable[[Run], None]:
    def fails(run: Run) -> None:
        model = _Failing(where)
        trainer = run.trainer(callbacks=[OnExceptionCheckpoint(run.folder)], enable_checkpointing=True)
        run.record_error("error", lambda: trainer.fit(model, run.loader()))
        run.observe(trainer, model)
        run.record("saved", (run.folder / "on_exception.ckpt").exists())

    return fails


for _where in ("first block", "loss", "backward"):
    case(
        f"an error in the {_where}, with OnExceptionCheckpoint, caught around fit",
        name=f"error_in_{_where.replace(' ', '_')}",
    )(_fails(_where))


class _Backbone(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), *[Block() for _ in range(4)])
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class _Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.backbone[2 * epoch - 1 : 2 * epoch + 1], optimizer, lr=0.01)


@case("BaseFinetuning unfreezes blocks of several stages")
def unfreezing(run: Run) -> None:
    run.fit(_Backbone(), callbacks=[_Unfreezing()], max_epochs=4)


@case("BackboneFinetuning")
def backbone_finetuning(run: Run) -> None:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, train_bn=False)
    run.fit(_Backbone(), callbacks=[callback], max_epochs=3)


@case("ModelSummary with example_input_array")
def example_input(run: Run) -> None:
    model = Classifier()
    model.example_input_array = torch.zeros(2, NUM_FEATURES, dtype=torch.float64)
    summary = ModelSummary()
    run.fit(model, callbacks=[summary], enable_model_summary=True)


@case("validate(ckpt_path) after a fit with WeightAveraging", tolerance=1e-6)
def validate_averages(run: Run) -> None:
    model = Classifier()
    trainer = run.fit(model, callbacks=[WeightAveraging()], observe=False)
    path = run.folder / "averages.ckpt"
    trainer.save_checkpoint(path)
    run.record("validated", trainer.validate(model, run.loader(), ckpt_path=path, verbose=False))


@case("validate(ckpt_path) after a fit with EMAWeightAveraging", tolerance=1e-6)
def validate_moving_averages(run: Run) -> None:
    model = Classifier()
    trainer = run.fit(model, callbacks=[EMAWeightAveraging(decay=0.5)], observe=False)
    path = run.folder / "averages.ckpt"
    trainer.save_checkpoint(path)
    run.record("validated", trainer.validate(model, run.loader(), ckpt_path=path, verbose=False))


class _Teacher(pl.LightningModule):
    """Train with a target network that is a moving average of the online network, as in BYOL.

    A pipeline has the two networks on different stages.
    """

    def __init__(self, hook: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.online = nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), Block(), Block())
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.hook = hook

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.target(batch[0] + 0.1)
        return functional.mse_loss(self.predictor(self.online(batch[0])), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    @torch.no_grad()
    def follow(self) -> None:
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.mul_(0.9).add_(online, alpha=0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.hook == "on_train_batch_end":
            self.follow()

    def on_before_zero_grad(self, *args: Any) -> None:
        if self.hook == "on_before_zero_grad":
            self.follow()


for _hook in ("on_train_batch_end", "on_before_zero_grad"):
    case(f"a teacher that follows its student by {_hook}", name=f"teacher_by_{_hook}")(
        lambda run, hook=_hook: run.fit(_Teacher(hook)) and None
    )


class _OfAllGradients(Classifier):
    """Compute norms of all gradients in hooks, and clip by a total norm that is computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        self.norms.append(float(torch.stack([param.grad.norm() for param in self.parameters()]).norm()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        total = sum(param.grad.pow(2).sum() for param in self.parameters() if param.grad is not None).sqrt()
        for param in self.parameters():
            param.grad.mul_(torch.clamp(0.1 / total, max=1.0))

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("largest", max(param.abs().max() for param in self.parameters()))


@case(
    "hooks that look at all gradients and weights, and clip by a total norm of their own",
    differs={"local": OWN_GRADIENTS},
)
def hooks_of_all_gradients(run: Run) -> None:
    model = _OfAllGradients()
    run.fit(model)
    run.record("norms", model.norms)


class _Sum(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")


@case("a loss that is a sum over samples", reference="ddp", differs=OTHER_LOSS)
def sum_loss(run: Run) -> None:
    run.fit(_Sum())


class _InBatch(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = functional.normalize(self(batch[0]), dim=1)
        return functional.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))


@case("a loss that compares the samples of a batch", reference="ddp", differs=OTHER_LOSS)
def in_batch_loss(run: Run) -> None:
    run.fit(_InBatch())


@case("a step makes tensors on next(self.parameters()).device, and on the device of a buffer")
def device_of_parameters(run: Run) -> None:
    class Makes(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[1].register_buffer("scale", torch.full((1,), 2.0))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            shift = torch.full_like(x, 0.1, device=next(self.parameters()).device)
            factor = torch.ones(1, device=self.net[1].scale.device, dtype=x.dtype)
            return functional.cross_entropy(self(x + shift) * factor, y)

    run.fit(Makes())


@case("a step makes tensors on next(self.parameters()).device after a hook has read the parameters of all stages")
def device_after_a_hook(run: Run) -> None:
    class Makes(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.size = float(sum(param.norm() for param in self.parameters()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            shift = torch.full_like(batch[0], 0.1, device=next(self.parameters()).device)
            return functional.cross_entropy(self(batch[0] + shift), batch[1])

    run.fit(Makes())


@case(
    "logs and metrics before the first layer, where the last rank has two stages",
    strategy={column: {"schedule": "interleaved_1f1b"} for column in STAGES},
)
def early_logs_of_two_stages(run: Run) -> None:
    class Early(Classifier):
        def __init__(self) -> None:
            super().__init__(num_blocks=6)
            self.total = SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            self.log("sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
            self.log("mean", x.mean(), on_step=False, on_epoch=True, sync_dist=True)
            self.total.update(float(len(x)))
            self.log("total", self.total, on_step=False, on_epoch=True)
            return functional.cross_entropy(self(x), y)

    run.fit(Early(), max_epochs=2)


@case("Evaluation steps that call no part of the model: `pass`, and a metric of the batch alone")
def evaluations_without_the_model(run: Run) -> None:
    class Counting(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/mean", batch[0].mean(), sync_dist=True)

    model = Counting().double()
    run.fit(model, val=True)
    run.record("metrics", run.trainer().test(model, run.loader(), verbose=False))
