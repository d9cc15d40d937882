"""What a Lightning user relies on, on modules written as he writes them, in a sharded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist import HybridShardStrategy, full_parameters
from lightning_dist.parity import assert_parity, whole_parameters
from tests.distributed.fit import make_trainer
from tests.models import GPT, ResNet, TestModule, Transformer
from tests.pool import WorkerPool

Weights = dict[str, np.ndarray]


def weights_of(model: nn.Module) -> Weights:
    return {name: weight.numpy() for name, weight in whole_parameters(model).items()}


def assert_same(actual: Weights, expected: Weights, tolerance: float = 1e-10, leave_out: Any = ()) -> None:
    assert_parity(
        {name: torch.from_numpy(weight) for name, weight in actual.items()},
        {name: torch.from_numpy(weight) for name, weight in expected.items()},
        tolerance,
        leave_out,
    )


# --- one training, several ways; each against the same with Lightning's own single device


class ClippedByValue(GPT):
    trainer_kwargs = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}


class PlainSGDClipped(GPT):
    trainer_kwargs = {"gradient_clip_val": 0.1}

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


class FunctionalHead(GPT):
    """Reads a parameter without running the module that owns it, and calls another method than forward."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = Transformer(tied=False)
        self.projection = nn.Linear(20, 20)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        x = functional.linear(functional.embedding(tokens, self.model.embedding.weight), self.projection.weight)
        for block in self.model.blocks:
            x = block(x)
        return functional.cross_entropy(self.model.head(x).flatten(0, 1), targets.flatten())


class NoModuleCalled(TestModule):
    """All of the model is used through functions: no hook of any module ever runs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.bias = nn.Parameter(torch.zeros(3))

    data = GPT.data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].to(self.bias.dtype)
        hidden = torch.tanh(functional.linear(x, self.net[0].weight, self.net[0].bias))
        return (functional.linear(hidden, self.net[2].weight) + self.bias).square().mean()


class SeveralForms(GPT):
    """Lists of optimizers with schedulers of both intervals cannot be automatic; a dict with a monitor can."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": scheduler, "monitor": "train/loss", "interval": "step", "frequency": 2}
        return [optimizer], [config]


class ManualWithRootParameter(GPT):
    """Manual optimization, two backwards a step, parameters on the root module read between them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.offset = nn.Parameter(torch.zeros(20))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in range(2):
            optimizer.zero_grad()
            loss = self.loss(batch) + (self.offset * (part + 1) - 1).square().mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()


class AccumulatesByHand(ManualWithRootParameter):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            self.loss(batch)  # a forward that no backward follows
        self.manual_backward((self.loss(batch) + (self.offset - 1).square().mean()) / 2)
        with torch.no_grad():
            self.loss(batch)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
            assert self.loss(batch) > 0  # with the weights after the step


class OverridesHooks(GPT):
    """Users change gradients in hooks, write their own backward and clip themselves."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)


class Recomputes(GPT):
    """Activation checkpointing runs blocks again in the backward."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        tokens, targets = batch
        x = self.model.embedding(tokens)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return functional.cross_entropy(self.model.head(self.model.norm(x)).flatten(0, 1), targets.flatten())


class Unfreezes(BaseFinetuning):
    """The blocks are frozen for two epochs."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer)


class Unfreezing(GPT):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for param in self.parameters():
            param.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([param for param in self.parameters() if param.requires_grad])

    def configure_callbacks(self) -> Any:
        return [Unfreezes()]

    trainer_kwargs = {"limit_train_batches": 2}


WAYS = [
    ClippedByValue,
    PlainSGDClipped,
    FunctionalHead,
    NoModuleCalled,
    SeveralForms,
    ManualWithRootParameter,
    AccumulatesByHand,
    OverridesHooks,
    Recomputes,
    Unfreezing,
]


def train(way: type[TestModule], layout: str) -> Weights:
    torch.manual_seed(0)
    model = way()
    kwargs = getattr(way, "trainer_kwargs", {})
    make_trainer(layout, max_steps=8, precision="64-true", **kwargs).fit(model)
    return weights_of(model)


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_in_one_process(pool: WorkerPool, way: type[TestModule]) -> None:
    before = {name: param.detach().numpy() for name, param in way().named_parameters()}
    expected = pool.run(train, 1, way, "auto")[0]
    assert any(not np.array_equal(before[name], expected[name]) for name in expected)
    assert_same(pool.run(train, 4, way, "2x2")[0], expected)
    assert_same(pool.run(train, 2, way, "full_shard")[0], expected)


class Weighted(GPT):
    """Sequences of unequal length: a mean over tokens that says how many they are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        position = torch.arange(8)
        targets = torch.where(position < 1 + tokens[:, :1] % 8, targets, -100)
        logits = self.model(tokens) * self.temperature
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return {"loss": loss, "weight": (targets != -100).sum()}


def train_weighted(layout: str, accumulate: int, num_steps: int) -> Weights:
    torch.manual_seed(0)
    # One process has what all ranks and microbatches have together in one batch; its plain mean is the weighted one.
    model = Weighted(global_batch_size=8 if layout != "auto" else 8 * accumulate)
    kwargs = {"accumulate_grad_batches": accumulate} if layout != "auto" else {}
    make_trainer(layout, max_steps=num_steps, precision="64-true", gradient_clip_val=1.0, **kwargs).fit(model)
    return weights_of(model)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_weighted_mean_over_unequal_numbers_of_tokens(pool: WorkerPool, accumulate: int) -> None:
    expected = pool.run(train_weighted, 1, "auto", accumulate, 5)[0]
    assert_same(pool.run(train_weighted, 4, "2x2", accumulate, 5)[0], expected)


# --- metrics, loops and callbacks


class Measured(GPT):
    """torchmetrics, sums and means over ranks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(num_classes=32, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        predicted = self.model(tokens).argmax(-1)
        self.accuracy(predicted.flatten(), targets.flatten())
        self.log("val/accuracy", self.accuracy)
        self.log("val/loss", self.loss(batch), sync_dist=True)
        self.log("val/count", float(len(tokens)), reduce_fx="sum", sync_dist=True)


def loops(layout: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Measured(optimizer="adamw")
    saving = ModelCheckpoint(folder / "checkpoints", monitor="val/loss", save_top_k=1, filename="{step}")
    trainer = make_trainer(
        layout,
        max_steps=8,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=3,
        limit_test_batches=3,
        limit_predict_batches=2,
        enable_checkpointing=True,
        callbacks=[saving, EarlyStopping("val/loss", patience=2, min_delta=1e3), LearningRateMonitor("step")],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
    )
    trainer.fit(model)
    result = {name: float(value) for name, value in trainer.callback_metrics.items()}
    result["stopped_at"] = trainer.global_step
    result["best"] = Path(saving.best_model_path).name
    result["best_score"] = float(saving.best_model_score)
    result["validate"] = trainer.validate(model, verbose=False)[0]["val/loss"]
    result["test"] = trainer.test(model, ckpt_path="best", verbose=False)[0]["test/loss"]
    result["predict"] = [batch.tolist() for batch in trainer.predict(model)]
    return result


def test_loops_metrics_and_callbacks(pool: WorkerPool, tmp_path: Path) -> None:
    expected = pool.run(loops, 1, "auto", tmp_path / "one")[0]
    ranks = pool.run(loops, 4, "2x2", tmp_path / "four")
    assert expected["stopped_at"] == 6  # EarlyStopping: no check improves by 1000 after the first
    for actual in ranks:
        assert actual["best"] == expected["best"]
        assert actual["stopped_at"] == 6
        assert actual["val/count"] == expected["val/count"] == 3 * 8
        for name in ("val/accuracy", "val/loss", "best_score", "validate", "test", "train/loss"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-4), name
    # Each sample is predicted once: rank r has samples r, r + 4, ...
    for batch in range(2):
        together = [None] * 8
        for rank, actual in enumerate(ranks):
            together[rank::4] = actual["predict"][batch]
        assert together == expected["predict"][batch]


def averaged(layout: str, folder: Path, num_steps: int, ckpt_path: str | None = None) -> tuple[Weights, float]:
    torch.manual_seed(0)
    model = GPT(optimizer="adamw")
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(
        layout,
        max_epochs=num_steps // 2,
        limit_train_batches=2,
        limit_val_batches=2,
        callbacks=[EMAWeightAveraging(decay=0.5), saving],
        enable_checkpointing=True,
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return weights_of(model), float(trainer.callback_metrics["val/loss"])


def test_weight_averaging(pool: WorkerPool, tmp_path: Path) -> None:
    expected, loss = pool.run(averaged, 1, "auto", tmp_path / "one", 6)[0]
    actual, sharded_loss = pool.run(averaged, 4, "2x2", tmp_path / "four", 6)[0]
    # The true gradient of a key's bias is zero: Adam divides rounding by rounding.
    biases = [f"model.blocks.{block}.qkv.bias" for block in range(2)]
    assert_same(actual, expected, 1e-4, biases)
    assert sharded_loss == pytest.approx(loss, rel=1e-5)
    resumed, _ = pool.run(averaged, 2, "full_shard", tmp_path / "two", 6, str(tmp_path / "four" / "epoch=1.ckpt"))[0]
    assert_same(resumed, actual, 1e-4, biases)


def refuse_weight_swapping() -> None:
    make_trainer("2x2", callbacks=[StochasticWeightAveraging(0.1)], max_steps=1).fit(GPT())


def test_stochastic_weight_averaging_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError, match="StochasticWeightAveraging swaps whole modules"):
        pool.run(refuse_weight_swapping, 4)


class Tunable(GPT):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr)


def find_lr(layout: str, folder: Path) -> tuple[list[float], Weights]:
    torch.manual_seed(0)
    model = Tunable()
    trainer = make_trainer(layout, max_steps=5, precision="64-true", default_root_dir=folder)
    finder = Tuner(trainer).lr_find(model, num_training=12, update_attr=False)
    return finder.results["loss"], weights_of(model)


def test_learning_rate_finder(pool: WorkerPool, tmp_path: Path) -> None:
    losses, before = pool.run(find_lr, 1, "auto", tmp_path)[0]
    actual, after = pool.run(find_lr, 2, "full_shard", tmp_path)[0]
    assert actual == pytest.approx(losses, rel=0.2)  # rank 0's own losses, not the batch's
    assert_same(after, before)
    assert list(tmp_path.iterdir()) == []


# --- construction


class OnMeta(GPT):
    """Built in configure_model: nothing is ever whole on a rank."""

    def __init__(self, **kwargs: Any) -> None:
        TestModule.__init__(self, **kwargs)
        self.model: Any = None
        self.seen: str = ""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Transformer()
            self.seen = str(next(self.model.parameters()).device)
            del self.model.position
            self.model.register_buffer("position", torch.zeros(8, 20), persistent=False)
            self.temperature = 1.0


def from_meta(layout: str) -> tuple[Weights, str, bool]:
    torch.manual_seed(int(dist.get_rank()) if dist.is_initialized() else 0)
    model = OnMeta()
    trainer = make_trainer(layout, max_steps=0)
    try:
        trainer.fit(model)
    except TypeError as error:
        return {}, str(error), False
    return weights_of(model), model.seen, model.model.head.weight is model.model.embedding.weight


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(8, 20), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(160.0).view(8, 20))


class OnMetaRight(OnMeta):
    def configure_model(self) -> None:
        if self.model is None:
            self.model = nn.Sequential(nn.Embedding(32, 20), nn.Linear(20, 20), nn.LayerNorm(20), nn.Linear(20, 32))
            self.model[3].weight = self.model[0].weight
            self.position = Position()
            self.seen = str(next(self.model.parameters()).device)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


def from_meta_right(layout: str) -> tuple[Weights, str, bool, float]:
    torch.manual_seed(7)
    model = OnMetaRight()
    make_trainer(layout, max_steps=3).fit(model)
    tied = model.model[3].weight is model.model[0].weight
    return weights_of(model), model.seen, tied, float(model.position.table.sum())


def test_configure_model_is_on_meta(pool: WorkerPool) -> None:
    error = pool.run(from_meta, 2, "full_shard")[0][1]
    assert error.startswith("Transformer (model) was created on the meta device and has no reset_parameters()")
    weights, seen, tied, total = pool.run(from_meta_right, 4, "2x2")[0]
    assert (seen, tied, total) == ("meta", True, sum(range(160)))
    # The same seed draws the same weights on any layout.
    assert_same(pool.run(from_meta_right, 2, "full_shard")[0][0], weights, 1e-5)


class MetricOnMeta(OnMetaRight):
    def configure_model(self) -> None:
        super().configure_model()
        self.accuracy = MulticlassAccuracy(num_classes=32)


def metric_on_meta() -> str:
    return refused_model(MetricOnMeta())


class Inferring(GPT):
    """Its evaluation steps see inference mode, as under NCCL; Lightning takes no_grad under gloo."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert torch.is_inference_mode_enabled()
        super().validation_step(batch, batch_idx)


def validate_then_fit(inference: bool) -> Weights:
    import lightning.pytorch.loops.utilities as loop_utilities

    torch.manual_seed(0)
    model = Inferring() if inference else GPT()
    trainer = make_trainer("2x2", max_steps=3, limit_val_batches=1, precision="64-true")
    is_initialized = loop_utilities._distributed_is_initialized
    if inference:
        loop_utilities._distributed_is_initialized = lambda: False
    try:
        trainer.validate(model, verbose=False)
    finally:
        loop_utilities._distributed_is_initialized = is_initialized
    trainer.limit_val_batches = 0
    trainer.fit(model)
    return weights_of(model)


def test_inference_mode_before_training(pool: WorkerPool) -> None:
    assert_same(pool.run(validate_then_fit, 4, True)[0], pool.run(validate_then_fit, 4, False)[0])


def class_and_hooks() -> tuple[str, bool, str]:
    torch.manual_seed(0)
    model = GPT()
    make_trainer("2x2", max_steps=1).fit(model)
    return type(model).__name__, type(model) is GPT, model.hparams.optimizer


def test_the_users_class_stays(pool: WorkerPool) -> None:
    assert pool.run(class_and_hooks, 4)[0] == ("GPT", True, "sgd")


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


def test_summary_with_example_input(pool: WorkerPool) -> None:
    assert pool.run(summary_runs, 4) == [1] * 4


# --- precision


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
    [
        ("32-true", "float32", "float32", "float32"),
        ("64-true", "float64", "float64", "float64"),
        ("bf16-mixed", "float32", "bfloat16", "float32"),
        ("bf16-true", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_precision(pool: WorkerPool, precision: str, stored: str, computed: str, loss: str) -> None:
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

    return refused_model(Foreign())


def no_parameters() -> str:
    class Empty(GPT):
        def __init__(self) -> None:
            TestModule.__init__(self)

    return refused_model(Empty())


def lbfgs() -> str:
    class Flat(GPT):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS([p for p in self.parameters() if p.requires_grad])

    return refused_model(Flat())


def unknown_unit() -> str:
    return refused_model(GPT(), strategy_kwargs={"units": ["Blok"]})


def sync_batchnorm() -> str:
    return refused_model(ResNet(), sync_batchnorm=True)


def refused_model(model: pl.LightningModule, **kwargs: Any) -> str:
    try:
        make_trainer("2x2", max_steps=1, **kwargs).fit(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (foreign_optimizer, r"Optimizer 0 \(SGD\) holds \d+ of \d+ parameters that are not Foreign's"),
        (no_parameters, "Empty has no parameters"),
        (lbfgs, "LBFGS searches along one flat vector"),
        (unknown_unit, r"units=\['Blok'\]: the model has no module of class 'Blok'. Did you mean Block"),
        (metric_on_meta, r"MulticlassAccuracy \(accuracy\) was created on the meta device"),
        (sync_batchnorm, r"Trainer\(sync_batchnorm=True\) cannot be honoured on the CPU"),
    ],
)
def test_refusals_reach_every_rank(pool: WorkerPool, cause: Any, message: str) -> None:
    for error in pool.run(cause, 4, timeout_s=20):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(error)


# --- outside of the steps


class Samples(pl.Callback):
    """Looks at the model on rank 0 alone, at each epoch's end, with and without the documented context."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.norms: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        tokens = torch.zeros(1, 8, dtype=torch.long)
        if not self.whole:
            if trainer.is_global_zero:
                pl_module.model(tokens)
            return
        with full_parameters(pl_module):
            if trainer.is_global_zero:
                for _ in range(2):
                    self.norms.append(float(pl_module.model(tokens).norm()))
                assert pl_module.model.head.weight.shape == (32, 20)
                assert type(pl_module.model.head.weight) is nn.Parameter


def sample(layout: str, whole: bool) -> tuple[list[float], Weights, str]:
    torch.manual_seed(0)
    model, samples = GPT(), Samples(whole)
    trainer = make_trainer(layout, max_epochs=2, limit_train_batches=2, callbacks=[samples], precision="64-true")
    try:
        trainer.fit(model)
    except Exception as error:
        return [], {}, f"{type(error).__name__}: {error}"
    return samples.norms, weights_of(model), ""


def test_sampling_on_rank_0(pool: WorkerPool) -> None:
    norms, weights, _ = pool.run(sample, 1, "auto", True)[0]
    ranks = pool.run(sample, 4, "2x2", True)
    assert len(norms) == 4
    assert ranks[0][0] == pytest.approx(norms, rel=1e-10)
    assert ranks[1][0] == []
    assert_same(ranks[0][1], weights)


def test_calling_a_sharded_model_on_one_rank_raises_at_once(pool: WorkerPool) -> None:
    with pytest.raises(
        AssertionError, match=r"NotInStepError: GPT is sharded, and .* was called outside of a training"
    ):
        pool.run(raise_sample_error, 4, timeout_s=30)


def raise_sample_error() -> None:
    *_, error = sample("2x2", False)
    if error:
        raise RuntimeError(error)


def enter_alone() -> str:
    trainer = make_trainer("full_shard", max_steps=1)
    model = GPT()
    trainer.fit(model)
    if dist.get_rank() == 0:
        try:
            with full_parameters(model, timeout_s=1.0):
                pass
        except Exception as error:
            return str(error)
    return ""


def test_context_that_one_rank_enters_does_not_hang(pool: WorkerPool) -> None:
    assert "rank 1 did not arrive within 1 s" in pool.run(enter_alone, 2, timeout_s=20)[0]


# --- replicas


class Diverges(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank >= 2:  # the second replica
            with torch.no_grad():
                pl_module.model.head.weight.to_local().flatten()[:1] *= 1 + 1e-7


def check_replicas(every: int, diverge: bool) -> str:
    callbacks = [Diverges()] if diverge else []
    trainer = make_trainer("2x2", {"check_replicas_every_n_steps": every}, max_steps=6, callbacks=callbacks)
    try:
        trainer.fit(GPT())
    except Exception as error:
        return f"{trainer.global_step} {type(error).__name__}: {error}"
    return ""


def test_replicas_that_differ_are_found(pool: WorkerPool) -> None:
    assert pool.run(check_replicas, 4, 1, False) == [""] * 4
    for error in pool.run(check_replicas, 4, 2, True):
        assert error.startswith("3 ReplicasDifferError: 1 of ")
        assert "model.embedding.weight" in error  # the head's, tied


# --- data and nodes


def sampler_numbers() -> tuple[int, int, int]:
    class Plain(GPT):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*self.data()), batch_size=4)

    model = Plain()
    trainer = make_trainer("2x2", max_steps=1, use_distributed_sampler=True)
    trainer.fit(model)
    sampler = trainer.train_dataloader.sampler
    return sampler.num_replicas, sampler.rank, trainer.num_training_batches


def test_data_is_split(pool: WorkerPool) -> None:
    assert pool.run(sampler_numbers, 4) == [(4, rank, 4096 // 4 // 4) for rank in range(4)]


def default_sizes() -> dict[str, Any]:
    strategy = HybridShardStrategy()
    trainer = make_trainer("auto", max_steps=1, strategy=strategy, sync_batchnorm=False)
    trainer.fit(GPT())
    return strategy.layout.describe()


def test_by_default_replicas_are_nodes(pool: WorkerPool) -> None:
    sizes = pool.run(default_sizes, 4, num_nodes=2)[0]
    assert sizes == {"dp_replicate_size": 2, "dp_shard_size": 2, "world_size": 4}


def default_on_one_node() -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer("auto", strategy="hybrid_shard")
    return [str(warning.message) for warning in caught]


def test_hybrid_on_one_node_says_what_it_is(pool: WorkerPool) -> None:
    assert any("the same as 'full_shard'" in text for text in pool.run(default_on_one_node, 2)[0])
