"""Test that logs, metrics and predictions of a pipeline agree with one process, and wrong steps are refused."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist import PipelineParallelStrategy
from tests.accelerator import place
from tests.pipeline_models import DeepGPT, Sequential
from tests.pool import RankFailed, WorkerPool


class Talkative(Sequential):
    """Log in every way, keep lists of tensors between steps, and update metrics."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accuracy, self.mean = MulticlassAccuracy(4), MeanMetric()
        self.val_accuracy = MulticlassAccuracy(4)
        self.kept: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.at_epoch_end: dict[str, Any] = {}
        self.average = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        images, labels = batch
        logits = self.model(images)
        loss = functional.cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(labels)), reduce_fx="sum", on_step=True, on_epoch=False)
        self.log_dict({"largest": logits.max(), "brightest": images.max()}, reduce_fx="max", on_step=True)
        self.log("input", images.mean())
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.log("average", self.average)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits, "index": batch_idx, "constant": 3}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        self.val_accuracy.update(logits, labels)
        self.kept.append(logits)
        self.losses.append(functional.cross_entropy(logits, labels))
        self.log("val/loss", self.losses[-1])

    def on_validation_epoch_end(self) -> None:
        self.at_epoch_end = {
            "logits": torch.cat(self.kept).double().cpu().numpy(),
            "losses": [float(loss) for loss in self.losses],
            "accuracy": float(self.val_accuracy.compute()),
        }
        self.log("val/accuracy", self.val_accuracy)
        self.kept.clear()
        self.losses.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", functional.cross_entropy(self.model(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)


class Outputs(pl.Callback):
    """Record the metrics and the outputs of every training step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.shapes: list[Any] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        params = list(pl_module.parameters())
        self.log_dict({"first norm": params[0].detach().norm(), "last sum": params[-1].detach().sum()})

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, out: Any, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.shapes.append((tuple(out["logits"].shape), float(out["logits"].sum()), out["index"], out["constant"]))


def trainer(strategy: Any, **kwargs: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = {
        **place(in_one_process=strategy == "auto"),
        "strategy": strategy,
        "precision": "64-true",
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def everything(in_stages: bool) -> dict[str, Any]:
    """Fit with validation, then validate, test and predict, and return all that was logged, kept and predicted."""
    torch.manual_seed(0)
    model, outputs = Talkative(), Outputs()
    strategy = PipelineParallelStrategy(num_microbatches=4) if in_stages else "auto"
    limits = {"limit_train_batches": 3, "limit_val_batches": 2, "limit_test_batches": 2, "limit_predict_batches": 2}
    run = trainer(strategy, max_epochs=2, callbacks=[outputs], **limits)
    run.fit(model)
    found: dict[str, Any] = {"logged": outputs.logged, "shapes": outputs.shapes, "at_epoch_end": model.at_epoch_end}
    found["fit"] = {name: float(value) for name, value in run.callback_metrics.items()}
    found["validate"] = run.validate(model, verbose=False)
    found["test"] = run.test(model, verbose=False)
    predictions = run.predict(model)
    found["predictions"] = None if predictions is None else torch.cat(predictions).tolist()
    return found


class WithNumbers(Talkative):
    """Predict numbers beside the classes: some are constants, and others are counts of samples."""

    counts = "none"

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        classes = self.model(batch[0]).argmax(-1)
        counts = {"none": {}, "sizes": {"size": len(batch[1])}, "values": {"zeros": int((classes == 0).sum())}}
        return {"classes": classes, "index": batch_idx, "half": 0.5, **counts[self.counts]}


def predicted(in_stages: bool, counts: str) -> Any:
    torch.manual_seed(0)
    model = WithNumbers()
    model.counts = counts
    strategy = PipelineParallelStrategy(num_microbatches=4) if in_stages else "auto"
    predictions = trainer(strategy, limit_predict_batches=3).predict(model) or []
    return [{**found, "classes": found["classes"].tolist()} for found in predictions]


@pytest.mark.parametrize("counts", ["none", "sizes", "values"])
def test_predicted_numbers_are_those_of_the_whole_batch(pool: WorkerPool, counts: str) -> None:
    assert pool.run(predicted, 2, True, counts)[0] == pool.run(predicted, 1, False, counts)[0]


def close(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            close(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            close(a, b)
    else:
        assert actual == pytest.approx(expected, rel=1e-6)  # Lightning computes means in float32.


def test_logs_metrics_outputs_and_predictions_equal_those_of_one_process(pool: WorkerPool) -> None:
    expected = pool.run(everything, 1, False)[0]
    for rank, found in enumerate(pool.run(everything, 2, True)):
        predictions = found.pop("predictions")
        if rank == 0:
            assert predictions == expected["predictions"]
        else:
            assert not predictions
        close(found, {key: value for key, value in expected.items() if key != "predictions"})


class OwnBackward(DeepGPT):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Searching(DeepGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoModel(DeepGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].double().mean().requires_grad_()


class Independent(DeepGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.model(batch[0])
        return self.temperature * 1.0


class Twice(DeepGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.loss(batch)


class Penalty(DeepGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + sum(param.square().sum() for param in self.model.parameters())


class Looks(DeepGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if loss < 5 else loss * 2


class OwnGenerator(DeepGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = torch.rand(batch[0].shape, generator=torch.Generator().manual_seed(batch_idx)) > 0.1
        return self.loss((batch[0] * kept, batch[1]))


class Compiled(DeepGPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[2].compile(backend="eager")


class Hidden(DeepGPT):
    """Use a tensor in the loss that is computed within a block and that the block does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.model.blocks[0].mlp.register_forward_hook(lambda module, args, out: self.seen.append(out * 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.clear()
        return self.loss(batch) + self.seen[0].square().mean()


class Raising(DeepGPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].norm_1.register_forward_hook(self.fail)

    def fail(self, *args: Any) -> None:
        if self.trainer.global_step == 1:
            raise ZeroDivisionError("in the first stage")


SWITCHES = {"skips": False}
"""A global variable, on which a step depends without tracing noticing it."""


class Wandering(DeepGPT):
    """Skip a block in some steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        SWITCHES["skips"] = batch_idx == 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.model.embedding(batch[0])
        for index, block in enumerate(self.model.blocks):
            if index != 3 or not SWITCHES["skips"]:
                x = block(x)
        return functional.cross_entropy(self.model.head(x).flatten(0, 1), batch[1].flatten())


class Unpicklable(DeepGPT):
    """Assign an attribute in the step that cannot be pickled."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.kept = (value for value in ())
        return loss


MISTAKES: list[tuple[type[DeepGPT], dict[str, Any], str]] = [
    (OwnBackward, {}, "overrides backward"),
    (Searching, {}, "LBFGS"),
    (NoModel, {}, "calls no module with parameters"),
    (Independent, {}, "does not depend on what the model returns"),
    (Twice, {}, "calls model.blocks.0 2 times"),
    (Penalty, {}, "weight_decay"),
    (
        Unpicklable,
        {},
        "The last stage could not send what the step returned or changed: TypeError: cannot pickle 'generator'",
    ),
    (OwnGenerator, {}, "torch.Generator of its own"),
    (Compiled, {}, "model.blocks.2 was compiled by module.compile()"),
    (Looks, {}, "decides by a value of a tensor (`if loss > ...`, `.item()` in a comparison) how its loss is computed"),
    (Hidden, {}, "made inside model.blocks.0"),
    (DeepGPT, {"virtual_stages": 5, "schedule": "interleaved_1f1b"}, "10 stages, and the model only 8 repeated blocks"),
    (DeepGPT, {"virtual_stages": 2}, "virtual_stages=2 does not go with schedule='1f1b'"),
    (DeepGPT, {"schedule": "2f2b"}, "schedule='2f2b' is none of gpipe"),
    (DeepGPT, {"num_microbatches": 3}, "num_microbatches=3 does not divide the batch of 8 samples"),
    (DeepGPT, {"num_microbatches": 1}, "num_microbatches=1 is too few for schedule='1f1b'"),
    (DeepGPT, {"split": ["blocks.3", "blocks.5"]}, "name 1, one for each stage but the first"),
    (DeepGPT, {"split": ["block.3"]}, "Did you mean"),
    (DeepGPT, {"pp_size": 3}, "pp_size must be one of 1, 2"),
]


def refused(cls: type[DeepGPT], options: dict[str, Any]) -> str:
    try:
        strategy = PipelineParallelStrategy(**{"num_microbatches": 4, **options})
        trainer(strategy, max_steps=3, limit_val_batches=0).fit(cls())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def without_stages() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(PipelineParallelStrategy(1, num_microbatches=4), max_steps=1, limit_val_batches=0).fit(DeepGPT())
    return [str(warning.message) for warning in caught]


def test_pipeline_arguments_without_effect_give_a_warning(pool: WorkerPool) -> None:
    assert any("have no effect" in text for text in pool.run(without_stages, 2)[0])


class SumOfLosses(Sequential):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * len(batch[0])


class RootOfLoss(Sequential):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).sqrt()


class ByItsAverage(Sequential):
    average = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss / self.average


def warnings_of(cls: type[Sequential]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(PipelineParallelStrategy(num_microbatches=4), max_steps=1, limit_val_batches=0).fit(cls())
    return " ".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("cls", "text"),
    [(Sequential, ""), (SumOfLosses, "a sum over"), (RootOfLoss, "not a mean over"), (ByItsAverage, "not a mean over")],
)
def test_a_loss_that_is_not_a_mean_over_samples_gives_a_warning(
    pool: WorkerPool, cls: type[Sequential], text: str
) -> None:
    for warned in pool.run(warnings_of, 2, cls)[1:]:
        assert (f"training_step is {text}" if text else "") in warned
        assert text or "mean over samples" not in warned


def fit_deep(cls: type[DeepGPT]) -> None:
    trainer(PipelineParallelStrategy(num_microbatches=4), max_steps=3, limit_val_batches=0).fit(cls())


@pytest.mark.parametrize(
    ("cls", "text"), [(Raising, "in the first stage"), (Wandering, "another path for some batches")]
)
def test_a_step_that_fails_raises_its_cause(pool: WorkerPool, cls: type[DeepGPT], text: str) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(fit_deep, 2, cls)
    assert text in caught.value.errors[0]


@pytest.mark.parametrize(("cls", "options", "text"), MISTAKES)
def test_a_step_or_an_argument_that_pipelines_do_not_support_is_refused_with_the_reason(
    pool: WorkerPool, cls: type[DeepGPT], options: dict[str, Any], text: str
) -> None:
    errors = pool.run(refused, 2, cls, options, timeout_s=60)
    assert text in errors[0], errors
    assert all("no error" not in error for error in errors)
