"""Test the compression of gradients between replicas."""

from __future__ import annotations

import contextlib
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist._compat import local_of
from lightning_dist.parallel_module import parallelized
from lightning_dist.plugins.callbacks.telemetry import StepTelemetry
from lightning_dist.run.parity import whole_gradients
from lightning_dist.techniques.compression import (
    BF16,
    COMPRESSORS,
    FP8,
    FP16,
    Compression,
    Compressor,
    DiLoCo,
    Int8,
    PowerSGD,
    TopK,
)
from lightning_dist.techniques.compression.compressor import Gradient
from lightning_dist.techniques.compression.wire import Wire
from tests.accelerator import device_type
from tests.distributed.fit import make_strategy, make_trainer, weights_of
from tests.models import GPT
from tests.pool import WorkerPool
from tests.thorough import one_in

WITH_FEEDBACK: dict[str, Compressor] = {
    "bf16": BF16(error_feedback=True),
    "fp16": FP16(error_feedback=True),
    "fp8": FP8(block_size=64, min_numel=64),
    "int8": Int8(block_size=64, min_numel=64),
    "powersgd": PowerSGD(rank=2, min_numel=64, min_compression_rate=1.0),
    "topk": TopK(ratio=0.05, block_size=100, min_numel=64),
}
"""Every compressor with error feedback, and arguments that compress the small models of these tests."""


def test_every_compressor_is_tested() -> None:
    assert WITH_FEEDBACK.keys() == COMPRESSORS.keys()


# Compressors by themselves


def apply_sums(compressor: Compressor, dtype: torch.dtype) -> tuple[float, bool, float]:
    """Average random gradients for 20 steps.

    Returns:
        The largest deviation of what was applied from the true means minus the residuals, relative to the largest sum;
        whether all ranks have applied the same bits; and the bytes sent relative to those of an exact all-reduce.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    wire, generator = Wire(dist.group.WORLD), torch.Generator().manual_seed(rank)
    shapes = {"matrix": (40, 30), "tensor": (9, 5, 3, 3), "tall": (301, 4)}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in shapes}
    true, applied = ({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()} for _ in "ab")
    sent_exactly = 0
    for step in range(20):
        gradients = [
            Gradient(name, torch.randn(shape, generator=generator).to(dtype), states[name], step)
            for name, shape in shapes.items()
        ]
        for gradient in gradients:
            mean = gradient.value.double().clone()
            dist.all_reduce(mean)
            true[gradient.name] += mean / size
            sent_exactly += 2 * (size - 1) * gradient.value.numel() * 4 // size
        compressor.average(gradients, wire)
        for gradient in gradients:
            applied[gradient.name] += gradient.value.double()
    worst, is_same = 0.0, True
    for name in shapes:
        missing = states[name]["residual"].double().clone()
        dist.all_reduce(missing)
        error = applied[name] + missing / size - true[name]
        worst = max(worst, float(error.abs().max() / true[name].abs().max()))
        first = applied[name].clone()
        dist.broadcast(first, 0)
        is_same &= torch.equal(first, applied[name])
    return worst, is_same, wire.num_bytes / sent_exactly


EXPECTED_BYTES = {
    "bf16": 1 / 2,
    "fp16": 1 / 2,
    "fp8": 17 / 64,
    "int8": 17 / 64,
    "powersgd": 2 * 419 / 2809,
    "topk": 0.05 * 5 / 4,
}
"""Bytes sent by two replicas relative to an exact all-reduce in float32, by formula; top-k sends float32 and uint8."""


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_applied_is_the_sum_of_gradients_minus_the_residuals(
    pool: WorkerPool, name: str, world_size: int
) -> None:
    for worst, is_same, _ in pool.run(apply_sums, world_size, WITH_FEEDBACK[name], torch.float64):
        assert worst < 1e-6
        assert is_same
    for worst, is_same, ratio in pool.run(apply_sums, 2, WITH_FEEDBACK[name], torch.float32):
        assert worst < 1e-4
        assert is_same
        assert ratio == pytest.approx(EXPECTED_BYTES[name], rel=0.2)


# Compressors in a training


class SGDGPT(GPT):
    def __init__(self, lr: float) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def gradients_of(
    layout: str, compression: Compressor | str | None, precision: Any, accumulate: int
) -> list[dict[str, Any]]:
    """Return the gradients of four steps, in which weights do not change."""
    recorded = []

    class Record(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            recorded.append({name: grad.numpy() for name, grad in whole_gradients(pl_module).items()})

    trainer = make_trainer(
        layout,
        {"compression": compression},
        max_steps=4,
        callbacks=[Record()],
        precision=precision,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(SGDGPT(lr=0.0))
    return recorded


def each_gradients_of(layout: str, compressions: list[Any], precision: Any) -> list[list[dict[str, Any]]]:
    return [gradients_of(layout, compression, precision, 2) for compression in compressions]


@pytest.mark.parametrize("layout", one_in(2, ["2x2", "4x1"]))
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_that_are_not_compressed_have_the_same_bits(pool: WorkerPool, layout: str, precision: str) -> None:
    late = PowerSGD(start_step=100, min_numel=64, min_compression_rate=1.0)
    ways = [None, late, *(["bf16"] if precision == "32-true" else [])]
    native, exact, *halved = pool.run(each_gradients_of, 4, layout, ways, precision)[0]
    assert len(native) == len(exact) == 4
    for expected, actual in zip(native, exact, strict=True):
        assert expected.keys() == actual.keys()
        assert all((expected[name] == actual[name]).all() for name in expected)
    for gradients in halved:
        assert_within_epsilon_of_bf16(gradients, native)


def assert_within_epsilon_of_bf16(halved: list[dict[str, Any]], native: list[dict[str, Any]]) -> None:
    differ = False
    for expected, actual in zip(native, halved, strict=True):
        for name in expected:
            # Each replica rounds its gradient, and the mean is rounded once more.
            bound = 2 * torch.finfo(torch.bfloat16).eps * abs(expected[name]).max() + 1e-12
            assert abs(expected[name] - actual[name]).max() <= bound, name
            differ |= bool((expected[name] != actual[name]).any())
    assert differ


def missing_sums(layout: str, compressor: Compressor | None, accumulate: int) -> dict[str, Any]:
    """Return, for this rank's shards, what four steps applied plus the mean residual of the replicas."""
    sums: dict[str, torch.Tensor] = {}

    class Record(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            for name, param in pl_module.named_parameters():
                if param.grad is not None:
                    sums[name] = sums.get(name, 0) + local_of(param.grad).clone()

    trainer = make_trainer(
        layout,
        {"compression": compressor} if compressor else {},
        max_steps=4,
        callbacks=[Record()],
        precision="64-true",
        accumulate_grad_batches=accumulate,
    )
    model = SGDGPT(lr=0.0)
    trainer.fit(model)
    compression = parallelized(model).get(Compression)
    if compression is not None:
        num_compressed = 0
        for name, state in compression.states.items():
            if "residual" in state:
                num_compressed += 1
                residual = state["residual"].clone()
                dist.all_reduce(residual, group=trainer.strategy.mesh["dp_replicate"].get_group())
                sums[name] += residual / trainer.strategy.layout.dp_replicate
        assert num_compressed >= 4
    return {name: value.cpu().numpy() for name, value in sums.items()}


def each_missing_sums(layout: str, compressors: list[Compressor | None], accumulate: int) -> list[dict[str, Any]]:
    return [missing_sums(layout, compressor, accumulate) for compressor in compressors]


@pytest.mark.parametrize(("layout", "names"), one_in(2, [("4x1", ["int8", "powersgd"]), ("2x2", [*WITH_FEEDBACK])]))
def test_residuals_hold_what_a_training_has_not_applied(pool: WorkerPool, layout: str, names: list[str]) -> None:
    compressors = [WITH_FEEDBACK[name] for name in names]
    for expected, *results in pool.run(each_missing_sums, 4, layout, [None, *compressors], 2):
        for compressor, actual in zip(compressors, results, strict=True):
            assert actual.keys() == expected.keys()
            for key in actual:
                largest = max(abs(expected[key]).max(initial=0), 1e-3)
                assert abs(actual[key] - expected[key]).max(initial=0) <= 1e-6 * largest, (compressor, key)


def train(layout: str, compressor: Compressor, num_steps: int) -> tuple[dict[str, Any], float]:
    losses = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            losses.append(float(trainer.callback_metrics["train/loss"]))

    options = {"compression": compressor, "check_replicas_every_n_steps": 10}
    trainer = make_trainer(layout, options, max_steps=num_steps, callbacks=[Record()])
    model = SGDGPT(lr=0.1)
    trainer.fit(model)
    assert losses[-1] < 0.8 * losses[0]
    return weights_of(model), losses[-1]


@pytest.mark.parametrize(
    ("layout", "name", "num_steps"),
    one_in(6, [*(("2x2", name, 50 if name == "powersgd" else 20) for name in WITH_FEEDBACK), ("4x1", "int8", 50)]),
)
def test_replicas_stay_equal_bit_by_bit(pool: WorkerPool, layout: str, name: str, num_steps: int) -> None:
    pool.run(train, 4, layout, WITH_FEEDBACK[name], num_steps)


def overflow(layout: str) -> tuple[list[bool], list[int], list[str]]:
    """Train with a gradient that is not finite in the third step of one rank."""
    changed, kept = [], []

    class Poisoned(GPT):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 2 and self.trainer.global_rank == 1 else loss

        def configure_optimizers(self) -> Any:
            # With foreach given, it does not become fused on an accelerator, where it would skip later steps as well.
            return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)

    class Record(pl.Callback):
        before: Any = None

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            now = [local_of(param.detach()).clone() for param in pl_module.parameters()]
            if self.before is not None:
                changed.append(any(not torch.equal(a, b) for a, b in zip(self.before, now, strict=True)))
            self.before = now
            compression = parallelized(pl_module).get(Compression)
            kept.append(sum("residual" in state for state in compression.states.values()))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Poisoned()
        options = {"compression": WITH_FEEDBACK["int8"], "check_replicas_every_n_steps": 1}
        make_trainer(layout, options, max_steps=5, callbacks=[Record()]).fit(model)
    assert all(torch.isfinite(local_of(param)).all() for param in model.parameters())
    return changed, kept, [str(warning.message) for warning in caught if "not finite" in str(warning.message)]


@pytest.mark.parametrize("layout", ["2x2", "4x1"])
def test_all_ranks_skip_a_step_with_a_gradient_that_is_not_finite(pool: WorkerPool, layout: str) -> None:
    for rank, (changed, kept, texts) in enumerate(pool.run(overflow, 4, layout)):
        assert changed == [True, False, True, True]
        assert [number > 0 for number in kept] == [True, True, False, True, True]
        assert len(texts) == (rank == 0)


class Recording(Logger):
    name = version = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return


def figures(compressor: Compressor) -> list[dict[str, float]]:
    """Return what telemetry logs in a training, besides what it logs without compression."""
    logger = Recording()
    options = {"compression": compressor}
    make_trainer("2x2", options, max_steps=9, callbacks=[StepTelemetry(4)], logger=logger).fit(SGDGPT(0.1))
    return [metrics for metrics in logger.logged if "comm/dp_replicate_mib_per_step" in metrics]


def test_figures_about_compression_are_logged(pool: WorkerPool) -> None:
    numel = sum(param.numel() for param in SGDGPT(0.1).parameters() if param.requires_grad)
    for logged in pool.run(figures, 4, Int8(block_size=64, min_numel=64)):
        assert len(logged) == 3
        for metrics in logged:
            exact = 4 * numel / 2 / 2**20
            assert 0.25 * exact < metrics["comm/dp_replicate_mib_per_step"] < 0.4 * exact
            ratio = exact / metrics["comm/dp_replicate_mib_per_step"]
            assert metrics["compression/ratio"] == pytest.approx(ratio, rel=0.1)
            if device_type() == "cpu":  # Elsewhere, the host does not wait for what it begins.
                assert metrics["compression/ms_per_step"] > 0
            assert 0 < metrics["compression/residual_over_gradient"] < 0.1
            assert metrics["grad/skipped_steps"] == 0
            # Two ranks that share a replica gather each parameter once or twice in a step, and reduce its gradient.
            assert 2 * exact < metrics["comm/dp_shard_mib_per_step"] < 3 * exact


class TwoHeads(pl.LightningModule):
    """Train one of two heads in each step by hand, and keep the gradient of the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.heads = torch.nn.ModuleList([torch.nn.Linear(40, 40), torch.nn.Linear(40, 1)])
        self.means: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.heads[batch_idx % 2](batch[0]).square().mean())
        states = parallelized(self).get(Compression).states
        residual = states["heads.0.weight"]["residual"].clone()
        dist.all_reduce(residual, group=self.trainer.strategy.mesh["dp_replicate"].get_group())
        self.means.append(residual)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(96, 40)), batch_size=2)


def means_of_residuals(layout: str) -> list[Any]:
    compressor = Int8(block_size=64, min_numel=1, fallback="bf16")
    model = TwoHeads()
    make_trainer(layout, {"compression": compressor}, max_steps=6, use_distributed_sampler=True).fit(model)
    return [mean.cpu().numpy() for mean in model.means]


@pytest.mark.parametrize("layout", ["2x2", "4x1"])
def test_a_kept_gradient_is_not_reduced_again(pool: WorkerPool, layout: str) -> None:
    for means in pool.run(means_of_residuals, 4, layout):
        assert len(means) == 6
        for used, unused in zip(means[::2], means[1::2], strict=True):  # In odd steps the first head is not used.
            assert abs(used).max() > 0
            assert abs(unused - used).max() <= 0.01 * abs(used).max()


class Slow(BF16):
    """Compress so slowly that a reduction ends after the error in its backward has been caught."""

    def average(self, gradients: Any, wire: Wire) -> None:
        time.sleep(0.1)
        super().average(gradients, wire)


class Retries(SGDGPT):
    """Catch an error in a backward whose gradients are not finite, and run another backward."""

    fails = True

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx == 1 and self.fails:
            handle = self.model.embedding.weight.register_hook(raise_error)
            with contextlib.suppress(ZeroDivisionError):
                self.manual_backward(self.loss(batch) * float("nan"))
            handle.remove()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def raise_error(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def retry(layout: str, fails: bool) -> dict[str, Any]:
    model = Retries()
    model.fails = fails
    make_trainer(layout, {"compression": Slow()}, max_steps=3).fit(model)
    return weights_of(model)


@pytest.mark.parametrize("layout", one_in(2, ["2x2", "4x1"]))
def test_reductions_of_a_failed_backward_do_not_count(pool: WorkerPool, layout: str) -> None:
    expected = pool.run(retry, 4, layout, False)[0]
    actual = pool.run(retry, 4, layout, True)[0]
    assert all((expected[name] == actual[name]).all() for name in expected)


# Checkpoints


class Resumable(GPT):
    """Use a loader to which Lightning gives a sampler, so that its position in the data is saved."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(optimizer="adamw")

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=2)


def fit(
    layout: str, compression: Any, num_steps: int, save: Path | None = None, resume: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int], list[str]]:
    """Train, and save at the end, or resume.

    Returns:
        The weights, the means over the replicas of this rank's residuals at the end, or right after they were loaded
        if ``num_steps`` have been trained already, the numbers of reductions, and the warnings.
    """
    held: dict[str, Any] = {}
    counts: dict[str, int] = {}

    class Record(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if resume is not None:
                self.record(trainer, pl_module)

        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if resume is None:
                self.record(trainer, pl_module)

        def record(self, trainer: pl.Trainer, pl_module: Any) -> None:
            compression = parallelized(pl_module).get(Compression)
            params = dict(pl_module.named_parameters())
            mesh = trainer.strategy.mesh["dp_replicate"]
            for name, state in sorted(compression.states.items()):
                if "residual" in state:
                    residual = state["residual"].clone()
                    dist.all_reduce(residual, group=mesh.get_group())
                    mean = residual / mesh.size()
                    held[name] = mean.cpu().numpy()
                    if isinstance(params[name], DTensor) and "-" not in layout:
                        like = DTensor.from_local(
                            mean, params[name].device_mesh, params[name].placements,
                            shape=params[name].shape, stride=params[name].stride(),
                        )  # fmt: skip
                        held[name] = like.full_tensor().cpu().numpy()
                    counts[name] = compression.num_reductions[name]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            "auto",
            max_steps=num_steps,
            callbacks=[Record()],
            strategy=make_strategy(layout, compression=compression, check_replicas_every_n_steps=1),
            use_distributed_sampler=True,
        )
        model = Resumable()
        trainer.fit(model, ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
            trainer.strategy.wait_for_checkpoints()
    texts = [str(warning.message) for warning in caught if "compression" in str(warning.message)]
    return weights_of(model), held, counts, texts


@pytest.mark.parametrize(
    ("layout", "name"),
    one_in(
        4,
        [
            ("2x2", "topk"),
            ("4x1", "int8"),
            ("tp2-2", "fp16"),
            ("pp2-2", "powersgd"),
        ],
    ),
)
def test_a_resumed_run_goes_on_bit_by_bit(pool: WorkerPool, tmp_path: Path, layout: str, name: str) -> None:
    whole = pool.run(fit, 4, layout, WITH_FEEDBACK[name], 6)
    pool.run(fit, 4, layout, WITH_FEEDBACK[name], 3, save=tmp_path / "saved")
    resumed = pool.run(fit, 4, layout, WITH_FEEDBACK[name], 6, resume=tmp_path / "saved")
    for (expected, *_), (actual, residuals, counts, texts) in zip(whole, resumed, strict=True):
        assert residuals
        assert set(counts.values()) == {3}
        assert not texts
        assert expected.keys() == actual.keys()
        assert all((expected[key] == actual[key]).all() for key in expected)


@pytest.mark.parametrize(
    ("before", "after", "save_residuals"),
    one_in(
        3,
        [
            ("2x2", "4x1", "all"),
            ("4x1", "2x2", "all"),
            ("2x1", "2x2", "all"),
            ("2x2", "4x1", "mean"),
            ("2x1", "2x2", "none"),
        ],
    ),
)
def test_residuals_survive_a_change_of_replicas_and_shards(
    pool: WorkerPool, tmp_path: Path, before: str, after: str, save_residuals: Any
) -> None:
    compressor = PowerSGD(rank=2, min_numel=16, min_compression_rate=1.0, save_residuals=save_residuals)
    path, num_ranks = tmp_path / "saved", 2 if before == "2x1" else 4
    saved = pool.run(fit, num_ranks, before, compressor, 3, save=path)[0][1]
    loaded = pool.run(fit, 4, after, compressor, 4, resume=path)[0][1]
    assert len(saved) >= 4
    if save_residuals == "none":
        assert not loaded
        return
    assert loaded.keys() == saved.keys()
    for name in saved:
        assert abs(loaded[name] - saved[name]).max() <= 1e-6 * abs(saved[name]).max(), name


def test_another_compressor_drops_the_residuals_and_says_so(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    pool.run(fit, 2, "2x1", WITH_FEEDBACK["powersgd"], 3, save=path)
    _, loaded, _, texts = pool.run(fit, 2, "2x1", WITH_FEEDBACK["int8"], 4, resume=path)[0]
    assert not loaded
    assert len(texts) == 1
    assert "saved with compression=powersgd" in texts[0]
    assert "compression=int8: the residuals in the checkpoint are dropped" in texts[0]


# Bad input


def refusal(layout: str, arguments: dict[str, Any]) -> str:
    try:
        make_trainer(layout, arguments, max_steps=1).fit(GPT())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("layout", "compression", "text"),
    [
        (
            "2x1",
            "zip",
            "compression='zip': there is no such compressor. The names are bf16, fp16, fp8, int8, powersgd, topk",
        ),
        ("1x2", "bf16", "there is one replica. Set dp_replicate_size to at least 2"),
        ("full_shard", "int8", "compression='int8' with strategy 'full_shard' on dp_replicate 1 x dp_shard 2"),
        ("2x1", PowerSGD(rank=1000), "rank=1000 is above the rank of every matrix of this model"),
        ("2x1", Int8(min_numel=10**9), "compression=int8 compresses no parameter of this model"),
        ("2x1", PowerSGD(rank=16), "factors of rank=16 have fewer elements by min_compression_rate=2"),
        ("2x1", Int8(fallback=TopK()), "fallback='topk' keeps residuals"),
    ],
)
def test_compression_that_cannot_be_honoured_is_refused(
    pool: WorkerPool, layout: str, compression: Any, text: str
) -> None:
    for error in pool.run(refusal, 2, layout, {"compression": compression}):
        assert error.startswith("ValueError")
        assert text in error


@pytest.mark.parametrize("argument", ["compression", "sync"])
def test_compression_of_which_no_shard_is_large_enough_is_refused(pool: WorkerPool, argument: str) -> None:
    largest = max(param.numel() for param in GPT().parameters())
    compressor = Int8(min_numel=largest)
    chosen = compressor if argument == "compression" else DiLoCo(2, compression=compressor)
    for error in pool.run(refusal, 4, "2x2", {argument: chosen}):
        assert error.startswith("ValueError: compression=int8 compresses no part of a parameter that a rank holds")
        assert f"min_numel={largest}" in error


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (PowerSGD, {"rank": 0}, "rank=0 must be at least 1"),
        (PowerSGD, {"min_compression_rate": 0.5}, "min_compression_rate=0.5 must be at least 1"),
        (TopK, {"ratio": 0.0}, "ratio=0.0 must be above 0 and at most 1"),
        (TopK, {"ratio": 1.5}, "ratio=1.5 must be above 0 and at most 1"),
        (TopK, {"momentum": 0.9, "error_feedback": False}, "momentum=0.9 with error_feedback=False"),
        (Int8, {"block_size": 6}, "block_size=6 must be a positive multiple of 4"),
        (Int8, {"start_step": -1}, "start_step=-1 must be"),
        (Int8, {"exclude": ["("]}, r"exclude='\(' is not a regular expression"),
        (Int8, {"save_residuals": "some"}, "save_residuals='some' must be 'all', 'mean' or 'none'"),
    ],
)
def test_arguments_that_are_not_valid_are_refused(kind: type[Compressor], arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**arguments)
