import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Dataset

from lightning_dist.plugins.callbacks import StepTelemetry
from lightning_dist.plugins.callbacks.telemetry import step_telemetry
from lightning_dist.run.telemetry import (
    BatchSize,
    StepMeter,
    StepTimer,
    Stopwatch,
    batch_size,
    memory,
    peak_memory_mib,
)


class Clock:
    """Replace the clock: time passes only by calls of :meth:`pass_ms`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_ms(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000


@dataclass
class Pair:
    label: str
    image: torch.Tensor


INPUT_IDS = torch.zeros(4, 16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (INPUT_IDS, BatchSize(4, 64)),
        ({"input_ids": INPUT_IDS, "labels": INPUT_IDS}, BatchSize(4, 64)),
        ((torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)), BatchSize(8, 0)),
        (
            [{"mask": torch.ones(2, 5, dtype=torch.bool)}, {"ids": torch.zeros(2, 5, dtype=torch.int32)}],
            BatchSize(2, 10),
        ),
        (Pair("a", torch.zeros(6, 2)), BatchSize(6, 0)),
        (torch.tensor(1.0), BatchSize(1, 0)),
        ({"text": ["no", "tensors"]}, BatchSize(0, 0)),
        (None, BatchSize(0, 0)),
    ],
)
def test_samples_and_tokens_of_a_batch_are_counted(batch: Any, expected: BatchSize) -> None:
    assert batch_size(batch) == expected


def test_peak_memory_is_the_peak_of_the_resident_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # A test that ran before in this process may have begun a new peak, and the old one, which is kept, may be higher.
    monkeypatch.setattr(memory, "_highest_before_reset", 0.0)
    before = peak_memory_mib(torch.device("cpu"))
    size = 64 * 2**20
    kept = ctypes.create_string_buffer(size)
    ctypes.memset(kept, 1, size)
    status = Path("/proc/self/status").read_text()
    kernel_peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024
    after = peak_memory_mib(torch.device("cpu"))
    assert after == pytest.approx(kernel_peak, abs=8)
    assert after >= before


def test_a_new_peak_keeps_the_old_one() -> None:
    device = torch.device("cpu")
    before = peak_memory_mib(device)
    memory.reset_peak(device)
    assert memory.peak_bytes_since(device) > 0
    assert peak_memory_mib(device) >= before


def test_step_timer_leaves_out_pauses_and_synchronizes_only_at_pauses_and_resumes() -> None:
    clock, waits = Clock(), []
    timer = StepTimer(lambda: waits.append(clock.now), clock)
    clock.pass_ms(500)  # This time is before the start.
    timer.resume()
    for _ in range(3):
        clock.pass_ms(20)
        timer.step()
    assert timer.pause() is True
    assert timer.pause() is False
    clock.pass_ms(1000)  # A validation takes this time.
    timer.resume()
    timer.resume()
    clock.pass_ms(20)
    timer.step()
    assert len(waits) == 3  # It synchronized at two resumes and a pause, but at no step.
    assert timer.lap() == (4, pytest.approx(0.080))
    clock.pass_ms(7)
    timer.step()
    assert timer.lap() == (1, pytest.approx(0.007))
    assert timer.lap() == (0, 0.0)


def test_a_lap_of_a_running_stopwatch_does_not_stop_it() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start()
    clock.pass_ms(10)
    assert watch.lap() == pytest.approx(0.010)
    clock.pass_ms(5)
    watch.stop()
    clock.pass_ms(5)
    assert watch.lap() == pytest.approx(0.005)


class Memory(DummyLogger):
    """Keep all logged metrics in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))

    def of(self, name: str) -> dict[int, float]:
        return {step: metrics[name] for step, metrics in self.logged if name in metrics}


class SlowData(Dataset[torch.Tensor]):
    def __init__(self, clock: Clock, length: int) -> None:
        self.clock, self.length = clock, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.pass_ms(2.5)
        return torch.zeros(16, dtype=torch.int64)


class SlowCheckpoints(TorchCheckpointIO):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.clock.pass_ms(3000)


class Slow(LightningModule):
    """Let time pass in hooks and steps: 20 ms in a step, 300 ms in a validation batch, 700 ms at an epoch's start.

    Loading a sample takes 2.5 ms (:class:`SlowData`), saving a checkpoint 3 s (:class:`SlowCheckpoints`).
    """

    def __init__(self, clock: Clock, manual: bool = False, warm_up_ms: float = 0) -> None:
        super().__init__()
        self.clock, self.warm_up_ms = clock, warm_up_ms
        self.automatic_optimization = not manual
        self.weight = torch.nn.Parameter(torch.ones(()))

    def on_train_epoch_start(self) -> None:
        self.clock.pass_ms(700)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clock.pass_ms(20 + self.warm_up_ms)
        self.warm_up_ms = 0
        loss = self.weight**2
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.step()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.clock.pass_ms(300)

    def configure_optimizers(self) -> Any:
        sgd = [torch.optim.SGD(self.parameters(), lr=0.0) for _ in range(1 if self.automatic_optimization else 2)]
        return sgd[0] if self.automatic_optimization else sgd


def fit(clock: Clock, module: Slow, telemetry: StepTelemetry, folder: Path, **kwargs: Any) -> Memory:
    logger = Memory()
    trainer = Trainer(
        accelerator="cpu",
        logger=logger,
        callbacks=[telemetry, ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1)],
        plugins=[SlowCheckpoints(clock)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    loader = DataLoader(SlowData(clock, 20), batch_size=2)
    trainer.fit(module, loader, loader)
    return logger


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_telemetry, "StepMeter", lambda device: StepMeter(device, clock))
    return clock


@pytest.mark.parametrize(
    ("module", "trainer", "steps_at", "step_ms", "data_ms"),
    [
        pytest.param({}, {}, [4, 9, 14, 19], 25, 5, id="plain"),
        pytest.param({"warm_up_ms": 9000}, {}, [4, 9, 14, 19], 25, 5, id="the first step is left out"),
        pytest.param({}, {"accumulate_grad_batches": 2}, [4, 9], 50, 10, id="accumulated"),
        pytest.param({"manual": True}, {}, [4, 9, 14, 19], 25, 5, id="two optimizers"),
        pytest.param({}, {"val_check_interval": 3}, [4, 9, 14, 19], 25, 5, id="validation inside an epoch"),
        pytest.param({}, {"log_every_n_steps": 0}, [], 0, 0, id="no logging"),
        pytest.param({}, {"log_every_n_steps": 6}, [5, 11, 17, 19], 25, 5, id="the rest at the end"),
    ],
)
def test_step_telemetry_logs_times_and_rates_without_pauses(
    clock: Clock,
    tmp_path: Path,
    module: dict[str, Any],
    trainer: dict[str, Any],
    steps_at: list[int],
    step_ms: float,
    data_ms: float,
) -> None:
    logger = fit(
        clock, Slow(clock, **module), StepTelemetry(), tmp_path, max_epochs=2, **({"log_every_n_steps": 5} | trainer)
    )
    assert logger.of("perf/step_ms") == pytest.approx(dict.fromkeys(steps_at, step_ms))
    assert logger.of("perf/data_ms") == pytest.approx(dict.fromkeys(steps_at, data_ms))
    assert logger.of("perf/samples_per_s") == pytest.approx(dict.fromkeys(steps_at, 2 / 0.025))
    assert logger.of("perf/tokens_per_s") == pytest.approx(dict.fromkeys(steps_at, 32 / 0.025))
    assert set(logger.of("memory/peak_mib")) == set(steps_at)
    # The metrics that the module itself logs have the same steps, so that they can be plotted together.
    assert set(logger.of("train/loss")) <= set(steps_at)
    assert bool(logger.of("train/loss")) == bool(steps_at)


class Split(Slow):
    """Let time pass in each phase: 20 ms in a forward, 6 ms in a backward, 1 ms in clipping and 3 ms in an update."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.clock.pass_ms(6)
        super().backward(loss, *args, **kwargs)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clock.pass_ms(12)
        if not self.automatic_optimization:
            self.manual_backward(self.weight**2)
            self.optimizers().step()
        self.clock.pass_ms(8)
        return self.weight**2

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.clock.pass_ms(1)

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.pass_ms(2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        optimizer.register_step_post_hook(lambda *args: self.clock.pass_ms(3))
        return optimizer


@pytest.mark.parametrize("manual", [False, True])
def test_the_time_of_a_step_is_split_into_its_phases(clock: Clock, tmp_path: Path, manual: bool) -> None:
    logger = fit(clock, Split(clock, manual), StepTelemetry(4), tmp_path, max_steps=8)
    phases = {"data": 5, "forward": 20, "backward": 6, "optimizer": 1 + 3}
    for phase, milliseconds in phases.items():
        assert logger.of(f"perf/{phase}_ms") == pytest.approx({3: milliseconds, 7: milliseconds})
    assert logger.of("perf/step_ms") == pytest.approx({3: sum(phases.values()) + 2, 7: sum(phases.values()) + 2})
    assert logger.of("perf/exposed_comm_ms") == {}  # One process waits for no other.


@pytest.mark.alone
def test_hooks_take_less_than_half_a_percent_of_a_step_of_ten_milliseconds(tmp_path: Path) -> None:
    # The bound is the time of a piece of Python code that takes 50 us on the machine on which the figure was measured:
    # machines half as fast, and busy ones, need more for both.
    telemetry, spent, units = StepTelemetry(log_every_n_steps=1000), [], []

    def timed(hook: Any) -> Any:
        def call(*args: Any) -> None:
            start = perf_counter()
            hook(*args)
            spent.append(perf_counter() - start)
            if hook.__name__ == hooks[-1]:
                units.append(_seconds_of_python_code())

        return call

    hooks = (
        "_before_fetch", "_after_fetch", "on_train_batch_start", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_train_batch_end",
    )  # fmt: skip
    for hook in hooks:
        setattr(telemetry, hook, timed(getattr(telemetry, hook)))
    fit(Clock(), Slow(Clock()), telemetry, tmp_path, max_epochs=20, limit_val_batches=0)
    per_step = [sum(spent[start : start + len(hooks)]) for start in range(0, len(spent), len(hooks))]
    assert len(per_step) >= 200
    assert median(per_step) < median(units)


def _seconds_of_python_code() -> float:
    start, values = perf_counter(), {}
    for number in range(1300):
        values[number % 7] = number
    return perf_counter() - start


def test_step_telemetry_has_its_own_interval_and_shows_tokens_per_second_in_the_progress_bar(
    clock: Clock, tmp_path: Path
) -> None:
    shown = []

    class Watch(StepTelemetry):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            shown.append(trainer.progress_bar_metrics)
            super().on_train_end(trainer, pl_module)

    logger = fit(clock, Slow(clock), Watch(log_every_n_steps=2), tmp_path, max_steps=8, log_every_n_steps=50)
    assert list(logger.of("perf/step_ms")) == [1, 3, 5, 7]
    assert shown[0]["tokens/s"] == 1280


def test_step_telemetry_can_be_used_in_two_fits_with_two_trainers(clock: Clock, tmp_path: Path) -> None:
    telemetry = StepTelemetry(log_every_n_steps=4)
    for _ in range(2):
        logger = fit(clock, Slow(clock), telemetry, tmp_path, max_steps=8)
        assert logger.of("perf/step_ms") == pytest.approx({3: 25, 7: 25})


def test_step_telemetry_refuses_an_interval_of_zero() -> None:
    with pytest.raises(MisconfigurationException, match=r"log_every_n_steps=0\): expected a positive number"):
        StepTelemetry(log_every_n_steps=0)


def _fit_two_ranks(folder: Path) -> list[tuple[int, dict[str, float]]]:
    clock = Clock()
    step_telemetry.StepMeter = lambda device: StepMeter(device, clock)  # type: ignore[assignment, misc]
    try:
        logger = fit(
            clock, Slow(clock), StepTelemetry(), folder, max_steps=4, log_every_n_steps=4, strategy="ddp", devices=2
        )
    finally:
        step_telemetry.StepMeter = StepMeter  # type: ignore[misc]
    return logger.logged


def test_step_telemetry_counts_the_samples_and_the_memory_of_all_ranks(pool: Any, tmp_path: Path) -> None:
    logged, _ = pool.run(_fit_two_ranks, 2, tmp_path)
    ((step, metrics),) = [(step, metrics) for step, metrics in logged if "perf/step_ms" in metrics]
    assert step == 3
    assert metrics["perf/step_ms"] == pytest.approx(25)
    assert metrics["perf/samples_per_s"] == pytest.approx(2 * 2 / 0.025)
    peaks = [metrics["memory/peak_mib_rank0"], metrics["memory/peak_mib_rank1"]]
    assert min(peaks) > 100
    assert metrics["memory/peak_mib"] == max(peaks)
