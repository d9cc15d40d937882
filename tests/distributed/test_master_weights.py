"""Test training in bfloat16 with master weights."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import MeshPrecision
from lightning_dist.parallel_module import parallelized
from lightning_dist.parity import whole_parameters
from lightning_dist.plugins.strategies.startup_table import startup_table
from tests.distributed.fit import Weights, make_strategy, make_trainer
from tests.models import GPT
from tests.pool import WorkerPool

KINDS = ["fp32", "kahan", "stochastic"]


class SmallSteps(GPT):
    """Train with AdamW and a learning rate, from weights that bfloat16 represents exactly."""

    def __init__(self, lr: float) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.lr = lr
        for param in self.parameters():
            param.data = param.data.to(torch.bfloat16).to(param.dtype)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.0)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=2)


def fit(
    layout: str,
    precision: str | dict[str, Any],
    lr: float,
    num_steps: int,
    save: Path | None = None,
    resume: Path | None = None,
) -> tuple[Weights, list[float]]:
    """Return the weights and the training losses.

    Args:
        layout: Layout of :func:`tests.distributed.fit.make_strategy`.
        precision: Kind of master weights, or Lightning's name of a precision, or the arguments of MeshPrecision.
        lr: Learning rate.
        num_steps: Number of the last step.
        save: Path at which a checkpoint is saved at the end.
        resume: Path of a checkpoint from which the training goes on.
    """
    losses: list[float] = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            losses.append(float(trainer.callback_metrics["train/loss"]))

    precise: dict[str, Any] = {"precision": precision}
    if isinstance(precision, dict):
        precise = {"plugins": [MeshPrecision(**precision)]}  # Its scaler is created with the Trainer.
    elif precision in KINDS:
        precise = {"plugins": [MeshPrecision(precision)]}  # type: ignore[arg-type]
    trainer = make_trainer(
        "auto",
        strategy=make_strategy(layout, check_replicas_every_n_steps=1),
        max_steps=num_steps,
        use_distributed_sampler=True,
        callbacks=[Record()],
        **precise,
    )
    model = SmallSteps(lr)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:  # The first steps would overflow with the default scale, and be skipped.
        scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})
    trainer.fit(model, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        trainer.strategy.wait_for_checkpoints()
    return {name: weight.float().numpy() for name, weight in whole_parameters(model).items()}, losses


def progress(weights: Weights, reference: Weights) -> float:
    """Return how far the weights have moved along the way of the reference, as a fraction of that way."""
    start = {name: param.detach().numpy() for name, param in SmallSteps(0.0).named_parameters()}
    way = {name: reference[name] - start[name] for name in start}
    along = sum(float(((weights[name] - start[name]) * way[name]).sum()) for name in start)
    return along / sum(float((step**2).sum()) for step in way.values())


@pytest.mark.parametrize(
    ("layout", "kinds"), [("2x2", KINDS), ("4x1", ["kahan"]), ("tp2-2", ["fp32"]), ("pp2-2", ["stochastic"])]
)
def test_updates_that_bfloat16_would_round_away_are_kept(pool: WorkerPool, layout: str, kinds: list[str]) -> None:
    def trained(precision: str) -> Weights:
        weights: Weights = {}
        for own, _ in pool.run(fit, 4, layout, precision, 1e-4, 25):
            weights |= own
        return weights

    reference = trained("32-true")
    for kind in kinds:
        assert progress(trained(kind), reference) == pytest.approx(1.0, abs=0.1), kind
    if layout == "2x2":
        assert progress(trained("bf16-true"), reference) < 0.5


def test_losses_are_those_of_float32(pool: WorkerPool) -> None:
    expected = pool.run(fit, 4, "2x2", "32-true", 3e-3, 25)[0][1]
    assert expected[-1] < 0.9 * expected[0]
    for kind in KINDS:
        actual = pool.run(fit, 4, "2x2", kind, 3e-3, 25)[0][1]
        if kind == "stochastic":  # Random rounding makes the weights noisy, but not biased.
            assert fmean(actual) == pytest.approx(fmean(expected), rel=0.01)
        else:
            assert actual == pytest.approx(expected, rel=0.01), kind


@pytest.mark.parametrize(("layout", "kind"), [("2x2", "kahan"), ("4x1", "fp32"), ("tp2-2", "stochastic")])
def test_a_resumed_run_goes_on_bit_by_bit(pool: WorkerPool, tmp_path: Path, layout: str, kind: str) -> None:
    whole = pool.run(fit, 4, layout, kind, 1e-3, 6)[0][0]
    pool.run(fit, 4, layout, kind, 1e-3, 3, save=tmp_path / "saved")
    resumed = pool.run(fit, 4, layout, kind, 1e-3, 6, resume=tmp_path / "saved")[0][0]
    assert whole.keys() == resumed.keys()
    assert all((whole[name] == resumed[name]).all() for name in whole)


def table() -> str:
    model, precision = SmallSteps(1e-3), MeshPrecision("stochastic")
    trainer = make_trainer("1x2", max_steps=1, plugins=[precision])
    trainer.fit(model)
    parallel = parallelized(model)
    assert parallel is not None
    return startup_table(trainer.strategy, parallel)


def test_the_table_at_the_start_says_how_weights_are_updated(pool: WorkerPool) -> None:
    for text in pool.run(table, 2):
        assert "stored in bfloat16" in text
        assert "updated in float32 (stochastic)" in text


def test_other_master_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="master_weights='fp64' must be one of 'fp32', 'kahan', 'stochastic'"):
        MeshPrecision("fp64")  # type: ignore[arg-type]
