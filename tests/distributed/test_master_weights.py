"""Test training in bfloat16 with master weights, and the other low precisions, against plain torch."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import MeshPrecision
from lightning_dist.parallel_module import parallelized
from lightning_dist.plugins.strategies.startup_table import startup_table
from lightning_dist.run.parity import whole_parameters
from tests.accelerator import on_gpu
from tests.distributed.fit import Weights, make_strategy, make_trainer
from tests.distributed.float32_masters import LowPrecision, TwoRates, progress, train_with_masters
from tests.pool import WorkerPool
from tests.thorough import one_in

KINDS = ["fp32", "kahan", "stochastic"]

NUM_STEPS = 10


class Resumable(TwoRates):
    """Have a loader that Lightning distributes, and whose position is in checkpoints."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=2)


def fit(
    layout: str,
    precision: str | dict[str, Any],
    num_steps: int = NUM_STEPS,
    model: type[TwoRates] = TwoRates,
    save: Path | None = None,
    resume: Path | None = None,
) -> tuple[Weights, list[float], str]:
    """Return the weights, the training losses and the table at the start.

    Args:
        layout: Layout of :func:`tests.distributed.fit.make_strategy`.
        precision: Kind of master weights, or Lightning's name of a precision, or the arguments of MeshPrecision.
        num_steps: Number of the last step.
        model: Class of the module.
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
    elif precision == "16-mixed":  # By its name, Lightning's Trainer would use bf16-mixed on a CPU.
        precise = {"plugins": [MixedPrecision("16-mixed", "cuda" if on_gpu() else "cpu")]}
    elif precision in KINDS:
        precise = {"plugins": [MeshPrecision(precision)]}  # type: ignore[arg-type]
    trainer = make_trainer(
        "auto",
        strategy=make_strategy(layout, check_replicas_every_n_steps=1),
        max_steps=num_steps,
        use_distributed_sampler=model is Resumable,
        callbacks=[Record()],
        **precise,
    )
    module = model()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:  # The first steps would overflow with the default scale, and be skipped.
        scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        trainer.strategy.wait_for_checkpoints()
    parallel = parallelized(module)
    assert parallel is not None
    weights = {name: weight.float().numpy() for name, weight in whole_parameters(module).items()}
    return weights, losses, startup_table(trainer.strategy, parallel)


def fits(layout: str, precisions: list[str | dict[str, Any]], num_steps: int) -> list[tuple[Weights, list[float], str]]:
    """Return what :func:`fit` returns for each precision."""
    return [fit(layout, precision, num_steps) for precision in precisions]


def assert_like_masters(
    pool: WorkerPool, num_ranks: int, layout: str, references: dict[Any, LowPrecision], num_steps: int = NUM_STEPS
) -> None:
    """Assert that trainings have the losses and the weights of plain torch with float32 masters.

    Args:
        pool: The workers.
        num_ranks: Number of ranks.
        layout: Layout of :func:`tests.distributed.fit.make_strategy`.
        references: For each precision of :func:`fit`, that of the reference; a dictionary is given by its items.
        num_steps: Number of steps.
    """
    precisions = [dict(precision) if isinstance(precision, tuple) else precision for precision in references]
    ranks = pool.run(fits, num_ranks, layout, precisions, num_steps)
    for index, (precision, low) in enumerate(references.items()):
        expected_weights, expected = train_with_masters(low, num_steps)
        assert expected[-1] < 0.9 * expected[0]
        weights: Weights = {}
        for rank in ranks:
            weights |= rank[index][0]
        losses = ranks[0][index][1]
        if precision == "stochastic":  # Random rounding makes the weights noisy, but not biased.
            assert fmean(losses) == pytest.approx(fmean(expected), rel=0.01)
        else:
            assert losses == pytest.approx(expected, rel=0.01), precision
        assert progress(weights, expected_weights) == pytest.approx(1.0, abs=0.1), precision


@pytest.mark.parametrize(
    ("num_ranks", "layout", "references"),
    one_in(
        4,
        [
            (2, "2x1", {"kahan": "bf16-true"}),
            (2, "tp2-1", {"fp32": "bf16-true"}),
            (2, "pp2-1", {"stochastic": "bf16-true"}),
            (4, "2x2", {**dict.fromkeys(KINDS, "bf16-true"), "bf16-mixed": "bf16-mixed", "16-mixed": "16-mixed"}),
        ],
    ),
)
def test_training_is_that_of_plain_torch_with_float32_masters(
    pool: WorkerPool, num_ranks: int, layout: str, references: dict[Any, LowPrecision]
) -> None:
    assert_like_masters(pool, num_ranks, layout, references)


def test_without_masters_bfloat16_rounds_updates_away(pool: WorkerPool) -> None:
    weights, _, table = pool.run(fit, 2, "1x2", "bf16-true")[0]
    assert progress(weights, train_with_masters("bf16-true", NUM_STEPS)[0]) < 0.5
    assert "updated in float32" not in table


def resumed(layout: str, precision: str | dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Return whether a resumed training ends with the bits of one that was not stopped, and the table."""
    whole, _, table = fit(layout, precision, 4, Resumable)
    fit(layout, precision, 2, Resumable, save=folder / "saved")
    weights = fit(layout, precision, 4, Resumable, resume=folder / "saved")[0]
    return whole.keys() == weights.keys() and all((whole[name] == weights[name]).all() for name in whole), table


@pytest.mark.parametrize(("layout", "kind"), one_in(3, [("1x2", "kahan"), ("2x1", "fp32"), ("tp2-1", "stochastic")]))
def test_a_resumed_run_goes_on_bit_by_bit(pool: WorkerPool, tmp_path: Path, layout: str, kind: str) -> None:
    for has_same_bits, table in pool.run(resumed, 2, layout, kind, tmp_path):
        assert has_same_bits
        assert "stored in bfloat16" in table
        assert f"updated in float32 ({kind})" in table


def test_other_master_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="master_weights='fp64' must be one of 'fp32', 'kahan', 'stochastic'"):
        MeshPrecision("fp64")  # type: ignore[arg-type]
