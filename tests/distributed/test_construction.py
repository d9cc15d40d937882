"""Test that modules are built on the meta device, keep their class and have the right dtypes, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.fit import Weights, assert_same, make_trainer, refused, weights_of
from tests.models import GPT, ResNet, TestModule, Transformer
from tests.pool import WorkerPool
from tests.thorough import one_in


class OnMeta(GPT):
    """Create the model on the meta device, where nothing is recorded of how its constructor initialises it.

    A buffer of the model is not initialised by any ``reset_parameters``.
    """

    def __init__(self, **kwargs: Any) -> None:
        TestModule.__init__(self, **kwargs)
        with torch.device("meta"):
            self.model: Any = self.build()
        self.temperature = 1.0

    def build(self) -> nn.Module:
        model = Transformer()
        del model.position
        model.register_buffer("position", torch.zeros(8, 20), persistent=False)
        return model


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(8, 20), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(160.0).view(8, 20))


class OnMetaRight(OnMeta):
    """Create a model on the meta device, all of whose modules have a ``reset_parameters``."""

    def build(self) -> nn.Module:
        self.position = Position()
        model = nn.Sequential(nn.Embedding(32, 20), nn.Linear(20, 20), nn.LayerNorm(20), nn.Linear(20, 32))
        model[3].weight = model[0].weight
        return model

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


def from_meta(layout: str) -> tuple[Weights, bool, float]:
    torch.manual_seed(7)
    model = OnMetaRight()
    make_trainer(layout, max_steps=3).fit(model)
    tied = model.model[3].weight is model.model[0].weight
    return weights_of(model), tied, float(model.position.table.sum())


def not_reset() -> str:
    return refused(OnMeta())


def test_a_model_on_the_meta_device_is_initialised_alike_in_any_layout(pool: WorkerPool) -> None:
    weights, tied, total = pool.run(from_meta, 4, "2x2")[0]
    assert (tied, total) == (True, sum(range(160)))
    # The same seed draws the same weights on any layout.
    assert_same(pool.run(from_meta, 2, "full_shard")[0][0], weights, 1e-5)


class Inferring(GPT):
    """Call the model in inference mode, in which Lightning runs the evaluations of other strategies with NCCL."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            loss = self.loss(batch)
        self.log("val/loss", loss.clone(), sync_dist=True)


def validate_then_fit(layout: str, inference: bool) -> Weights:
    torch.manual_seed(0)
    model = Inferring() if inference else GPT()
    trainer = make_trainer(layout, max_steps=3, limit_val_batches=1, precision="64-true")
    trainer.validate(model, verbose=False)
    trainer.limit_val_batches = 0
    trainer.fit(model)
    return weights_of(model)


@pytest.mark.parametrize("layout", one_in(3, ["2x2", "4x1", "tp2-2"]))
def test_a_validation_in_inference_mode_does_not_change_the_training_after_it(pool: WorkerPool, layout: str) -> None:
    assert_same(pool.run(validate_then_fit, 4, layout, True)[0], pool.run(validate_then_fit, 4, layout, False)[0])


def class_and_hyperparameters() -> tuple[str, bool, str]:
    torch.manual_seed(0)
    model = GPT()
    make_trainer("2x2", max_steps=1).fit(model)
    return type(model).__name__, type(model) is GPT, model.hparams.optimizer


def test_a_sharded_module_keeps_its_class_and_hyperparameters(pool: WorkerPool) -> None:
    assert pool.run(class_and_hyperparameters, 4)[0] == ("GPT", True, "sgd")


class WithExample(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(1, 8, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def summary_runs() -> int:
    trainer = make_trainer("2x2", max_steps=1, enable_model_summary=True)
    trainer.fit(WithExample())
    return trainer.global_step


def test_the_model_summary_runs_with_an_example_input(pool: WorkerPool) -> None:
    assert pool.run(summary_runs, 4) == [1] * 4


class Dtypes(GPT):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: dict[str, str] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["computed"] = str(self.model.head.weight.dtype)
        self.seen["logits"] = str(self.model(batch[0]).dtype)
        loss = super().training_step(batch, batch_idx)
        self.seen["loss"] = str(loss.dtype)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["stored"] = str(self.model.head.weight.dtype)
        self.seen["gradient"] = str(self.model.head.weight.grad.dtype)


def dtypes(precision: str) -> tuple[dict[str, str], list[float]]:
    torch.manual_seed(0)
    model = Dtypes(optimizer="adamw")
    trainer = make_trainer("2x2", max_steps=3, precision=precision)
    trainer.fit(model)
    state = trainer.optimizers[0].state[model.model.head.weight]
    model.seen["state"] = str(state["exp_avg"].dtype)
    return model.seen, float(trainer.callback_metrics["train/loss"])


@pytest.mark.parametrize(
    ("precision", "stored", "computed", "loss"),
    one_in(
        2,
        [
            ("32-true", "float32", "float32", "float32"),
            ("64-true", "float64", "float64", "float64"),
            ("bf16-mixed", "float32", "bfloat16", "float32"),
            ("bf16-true", "bfloat16", "bfloat16", "bfloat16"),
        ],
    ),
)
def test_each_precision_has_its_dtypes_and_a_loss_close_to_float32(
    pool: WorkerPool, precision: str, stored: str, computed: str, loss: str
) -> None:
    seen, value = pool.run(dtypes, 4, precision)[0]
    assert seen["stored"] == seen["gradient"] == seen["state"] == f"torch.{stored}"
    assert seen["computed"] == f"torch.{computed}"
    assert seen["loss"] == f"torch.{loss}"
    assert value == pytest.approx(pool.run(dtypes, 4, "32-true")[0][1], rel=0.05)


def foreign_optimizer() -> str:
    class Foreign(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.made = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            return self.made

    return refused(Foreign())


def no_parameters() -> str:
    class Empty(GPT):
        def __init__(self) -> None:
            TestModule.__init__(self)

    return refused(Empty())


def tiny_eps() -> str:
    return refused(GPT(optimizer="adamw"), precision="16-true")


def unknown_unit() -> str:
    return refused(GPT(), strategy_kwargs={"units": ["Blok"]})


def sync_batchnorm() -> str:
    return refused(ResNet(), sync_batchnorm=True)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (foreign_optimizer, r"Optimizer 0 \(SGD\) holds \d+ of \d+ parameters that are not Foreign's"),
        (no_parameters, "Empty has no parameters"),
        (tiny_eps, r"Optimizer 0 \(AdamW\) has eps=1e-08, which is zero in float16"),
        (unknown_unit, r"units=\['Blok'\]: the model has no module of class 'Blok'. Did you mean Block"),
        (not_reset, r"Transformer \(model\) has tensors on the meta device that its constructor gives no values, and"),
        (sync_batchnorm, r"Trainer\(sync_batchnorm=True\) cannot be honoured on the CPU"),
    ],
)
def test_wrong_modules_and_arguments_are_refused_on_every_rank(pool: WorkerPool, cause: Any, message: str) -> None:
    for error in pool.run(cause, 4, timeout_s=20):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(error)
