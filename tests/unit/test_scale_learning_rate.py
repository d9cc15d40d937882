"""Learning rates are scaled with the global batch, under every scheduler, and once when a run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist.plugins.callbacks import ScaleLearningRate
from tests.unit.test_telemetry import Memory

NUM_SAMPLES, DIM = 2048, 10
RATE = 0.01


class Recorded(torch.optim.SGD):
    """Keep the learning rate of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used: list[float] = []

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.used.append(self.param_groups[0]["lr"])
        super().step()
        return loss


class Regression(pl.LightningModule):
    """Fit a linear function, and keep the loss over all samples after every 64 of them."""

    def __init__(self, batch_size: int, scheduler: Any = None, lr: Any = RATE, **monitor: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_SAMPLES, DIM, generator=generator)
        weights = torch.randn(DIM, 1, generator=generator)
        self.y = self.x @ weights + 0.5 * torch.randn(NUM_SAMPLES, 1, generator=generator)
        self.layer = nn.Linear(DIM, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.batch_size, self.scheduler, self.lr, self.monitor = batch_size, scheduler, lr, monitor
        self.losses: list[float] = []
        self.rates: list[float] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.loss(*batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) * self.batch_size % 64 == 0:
            with torch.no_grad():
                self.losses.append(float(self.loss(self.x, self.y)))

    def configure_optimizers(self) -> Any:
        optimizer = Recorded(self.parameters(), lr=self.lr)
        if self.scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.scheduler(optimizer), "interval": "step", **self.monitor}]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.x, self.y), batch_size=self.batch_size)


def train(model: pl.LightningModule, *callbacks: Any, resume: Path | None = None, **kwargs: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "callbacks": list(callbacks),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(**{**defaults, **kwargs})
    trainer.fit(model, ckpt_path=resume, weights_only=False if resume else None)
    return trainer


def test_the_linear_rule_gives_the_loss_curve_of_the_smaller_batch() -> None:
    curves = []
    for batch_size, callbacks in ((4, []), (16, [ScaleLearningRate(base_batch=4)]), (16, [])):
        model = Regression(batch_size)
        train(model, *callbacks)
        curves.append(torch.tensor(model.losses))
    small, scaled, unscaled = curves
    assert len(small) == len(scaled) == NUM_SAMPLES // 64
    difference, without = ((curve / small - 1).abs().max() for curve in (scaled, unscaled))
    assert difference < 0.05  # It is 4.1%; without scaling, the loss is up to 4.3 times as high.
    assert without > 3


class Cosine(lr_scheduler.CosineAnnealingLR):
    """Compute each rate from the one before, as torch's own chainable schedulers do, with a lowest rate."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, T_max=12, eta_min=0.002)


SCHEDULERS: dict[str, Any] = {
    "none": None,
    "recursive": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "closed": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "with a lowest rate": Cosine,
    "with rates of its own": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20),
    "of several": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.StepLR(optimizer, 3, 0.5)],
        [4],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("rule", "factor", "warmup_steps"), [("linear", 8.0, 0), ("sqrt", 8**0.5, 5)])
def test_every_step_has_the_rate_of_the_scheduler_times_the_factor(
    name: str, rule: Any, factor: float, warmup_steps: int
) -> None:
    plain, scaled = Regression(32, SCHEDULERS[name]), Regression(32, SCHEDULERS[name])
    own = train(plain, max_steps=10).optimizers[0].used
    callback = ScaleLearningRate(base_batch=4, rule=rule, warmup_steps=warmup_steps)
    trainer = train(scaled, callback, max_steps=10)
    factors = [1 + (factor - 1) * min(step / warmup_steps, 1) if warmup_steps else factor for step in range(10)]
    expected = [rate * by for rate, by in zip(own, factors, strict=True)]
    assert trainer.optimizers[0].used == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 5 or name == "none"
    assert scaled.rates == plain.rates  # Outside of steps, nothing is scaled.


def test_a_plateau_is_found_as_without_scaling() -> None:
    def scheduler(optimizer: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.001)

    class Logs(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("constant", 1.0)
            return super().training_step(batch, batch_idx)

    model = Logs(32, scheduler, monitor="constant")
    used = train(model, ScaleLearningRate(base_batch=16), max_steps=6).optimizers[0].used
    assert used == pytest.approx([0.02, 0.02, 0.01, 0.005, 0.0025, 0.002])


def test_the_monitor_shows_scaled_rates_wherever_it_is_listed() -> None:
    logger = Memory()
    monitor = LearningRateMonitor("step")
    train(
        Regression(32), monitor, ScaleLearningRate(4, warmup_steps=2), max_steps=4, logger=logger, log_every_n_steps=1
    )
    rates = [metrics["lr-Recorded"] for _, metrics in logger.logged if "lr-Recorded" in metrics]
    assert rates == pytest.approx([0.01, 0.045, 0.08, 0.08])


def test_the_global_batch_counts_accumulated_batches_and_batches_between_updates_have_no_scale() -> None:
    model = Regression(16)
    trainer = train(model, ScaleLearningRate(32), accumulate_grad_batches=4, max_steps=3)
    assert trainer.optimizers[0].used == pytest.approx([0.02] * 3)
    assert model.rates == [0.01] * 12


class TwoOptimizers(Regression):
    """Step two optimizers by hand, and their schedulers after each or, if that is ``too_early``, within each step."""

    def __init__(self, too_early: bool) -> None:
        super().__init__(16)
        self.automatic_optimization = False
        self.other = nn.Linear(DIM, 1)
        self.too_early = too_early

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parts = zip((self.layer, self.other), self.optimizers(), self.lr_schedulers(), strict=True)
        for model, optimizer, scheduler in parts:
            optimizer.zero_grad()
            self.manual_backward((model(batch[0]) - batch[1]).square().mean())
            handle = None
            if self.too_early:
                handle = optimizer.optimizer.register_step_pre_hook(lambda *_, own=scheduler: own.step())
            optimizer.step()
            scheduler.step()
            if handle is not None:
                handle.remove()

    def configure_optimizers(self) -> Any:
        optimizers = [Recorded(part.parameters(), lr=RATE) for part in (self.layer, self.other)]
        return optimizers, [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]


def test_manual_optimization_is_scaled_and_a_scheduler_inside_of_a_step_is_refused() -> None:
    trainer = train(TwoOptimizers(too_early=False), ScaleLearningRate(8), max_steps=6)
    for optimizer in trainer.optimizers:
        assert optimizer.used == pytest.approx([0.02, 0.01, 0.005])
    with pytest.raises(
        MisconfigurationException, match=r"learning rate 0\.01 of Recorded for a step, in which something"
    ):
        train(TwoOptimizers(too_early=True), ScaleLearningRate(8), max_steps=6)


@pytest.mark.parametrize("name", ["recursive", "none"])
def test_a_run_that_resumes_scales_once(tmp_path: Path, name: str) -> None:
    def callbacks() -> list[Any]:
        return [
            ScaleLearningRate(base_batch=8, warmup_steps=6),
            ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1),
        ]

    limits = {"max_epochs": 2, "limit_train_batches": 4, "enable_checkpointing": True}
    whole, resumed = Regression(32, SCHEDULERS[name]), Regression(32, SCHEDULERS[name])
    used = train(whole, *callbacks(), **limits).optimizers[0].used
    (path,) = tmp_path.glob("*step=4.ckpt")
    saved = torch.load(path, weights_only=False)["optimizer_states"][0]["param_groups"][0]["lr"]
    assert saved == pytest.approx(RATE * (0.9**4 if name == "recursive" else 1))
    trainer = train(resumed, *callbacks(), resume=path, **limits)
    assert trainer.optimizers[0].used == pytest.approx(used[4:], rel=1e-12)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


class Unknown(Regression):
    def train_dataloader(self) -> Any:
        return [(self.x[:8], self.y[:8])]


@pytest.mark.parametrize(
    ("model", "callbacks", "text"),
    [
        (lambda: Unknown(8), [], "the number of samples in an optimizer step is not known"),
        (lambda: Regression(8), [GradientAccumulationScheduler({0: 2})], "with a GradientAccumulationScheduler"),
        (lambda: Regression(8), [ScaleLearningRate(4)], "is listed twice"),
        (lambda: Regression(8, lr=torch.tensor(0.1)), [], "Recorded(lr=tensor(0.1000)): only a learning rate that is"),
    ],
)
def test_what_cannot_be_scaled_is_refused_by_name(model: Any, callbacks: list[Any], text: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        train(model(), ScaleLearningRate(4), *callbacks, max_steps=2)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"base_batch": 0}, "base_batch=0): expected 1 or more"),
        ({"base_batch": 4, "warmup_steps": -1}, "warmup_steps=-1): expected 0 or more"),
        ({"base_batch": 4, "rule": "cubic"}, "rule='cubic'): expected 'linear' or 'sqrt'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        ScaleLearningRate(**arguments)
    assert text in str(caught.value)


def test_a_configuration_can_ask_for_it() -> None:
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[pl.Callback])
    given = {"class_path": "lightning_dist.plugins.callbacks.ScaleLearningRate",
             "init_args": {"rule": "sqrt", "base_batch": 256, "warmup_steps": 500}}  # fmt: skip
    (callback,) = parser.instantiate_classes(parser.parse_object({"callbacks": [given]})).callbacks
    assert (callback.rule, callback.base_batch, callback.warmup_steps) == ("sqrt", 256, 500)
