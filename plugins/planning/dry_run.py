"""Run the first steps of a training as one rank of many, on tensors without values, and measure what they need."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import ClusterEnvironment
from torch import Tensor
from typing_extensions import override

from lightning_dist._compat import tree_leaves, without_process_group
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.plugins.planning.environment import SimulatedEnvironment
from lightning_dist.plugins.planning.forked import in_fork
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.plugins.strategies.steps import example_step
from lightning_dist.run.simulation import SimulatedRank, StorageMeter, Work, simulate_rank, without_values
from lightning_dist.run.telemetry.batch import BatchSize, batch_size
from lightning_dist.techniques.protocol import Scheduled

__all__ = ["DryRun", "Make", "dry_run", "prepare_data", "run_as_rank"]

Make = Callable[[], tuple[LightningModule, Any, Mapping[str, Any]]]
"""Function that makes the module, its data, and the arguments of a Trainer."""

_FIXED: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "profiler": None,
}
"""The arguments of a Trainer that a dry run chooses itself."""

_FEWEST_STEPS, _FEWEST_EPOCHS = 16, 2
"""A training is taken to be at least as long, so that each optimizer makes two steps."""

_MOST_ROUNDS = 16
"""Number of batches with a step of an optimizer after which no other optimizer is waited for."""


@dataclass(frozen=True)
class DryRun:
    """Hold what a rank needs in its second optimizer step, the first one that has the states of optimizers.

    With manual optimization, it lasts until each optimizer has made a step.

    Args:
        rank: Global rank that was simulated.
        resident: Bytes of all tensors when the step begins.
        peak: The largest number of bytes of all tensors in the step.
        work: What the rank computes and sends in forwards and backwards.
        optimizer: What it computes and sends from the begin of the optimizer's step on.
        batch: Samples and tokens of the rank's batches in the step.
        axes: The axes of the mesh over which each process group goes that ``work`` and ``optimizer`` name.
        num_data_parallel: Number of ranks that have different batches.
        num_microbatches: Number of parts of a batch that go through a pipeline; 1 without one.
        num_batches: Number of batches of the step.
        fill: Time that the rank waits for other stages of a pipeline, as a fraction of the time that it works.
    """

    rank: int
    resident: int
    peak: int
    work: Work
    optimizer: Work
    batch: BatchSize
    axes: Mapping[str, tuple[str, ...]]
    num_data_parallel: int
    num_microbatches: int
    num_batches: int = 1
    fill: float = 0.0


def dry_run(
    make: Make,
    num_nodes: int,
    num_devices: int,
    rank: int = 0,
    backend: str = "gloo",
) -> DryRun:
    """Run two optimizer steps of a training as one rank of many, in one process, without sending or computing.

    The strategy, the Trainer's loops, the module's step and the optimizers run as in a real training. Only tensors have
    no values (see :class:`lightning_dist.run.simulation.tensors.ValuelessTensors`). This happens in a process of its
    own, so that nothing of it is left.

    Args:
        make: Function that makes the module, its data (a loader, a data module, or None if the module has loaders), and
            the arguments of the Trainer, with the strategy as an object. It is called in the simulation, so that a
            model that is larger than this machine's memory can be made in a constructor. If this process has run a
            backward before, it must be one that can be pickled, such as a function at module level.
        num_nodes: Number of nodes of the training.
        num_devices: Number of devices of a node.
        rank: The rank that is simulated, in ``[0, num_nodes * num_devices)``.
        backend: Backend over which the ranks communicate, ``"gloo"`` or ``"nccl"``.

    Raises:
        RuntimeError: If the data end before the second step, or the process of the dry run ends by a signal.
        Exception: What the strategy raises because it refuses the training, or the module because it cannot run
            without values.
    """
    return in_fork(partial(run_as_rank, make, num_nodes, num_devices, rank, backend))


def run_as_rank(
    make: Make, num_nodes: int, num_devices: int, rank: int, backend: str, prepares_data: bool = True
) -> DryRun:
    """Do what :func:`dry_run` does in this process, in which caches of torch keep traces of it.

    Args:
        make: As for :func:`dry_run`, like the others.
        num_nodes: Number of nodes.
        num_devices: Number of devices of a node.
        rank: The rank that is simulated.
        backend: Backend over which the ranks communicate.
        prepares_data: Whether ``prepare_data`` of the module and of its data is called first.
    """
    num_ranks = num_nodes * num_devices
    if prepares_data:
        prepare_data(make, num_nodes, num_devices, backend)
    with _quietly(), _without_gpus(), without_process_group(), simulate_rank(num_ranks, rank, backend) as simulation:
        has_own_memory = backend != "gloo"
        with _on_host(simulation.meter, has_own_memory):  # What the module has is on the device after the next lines.
            module, data, arguments = make()
            with suppress(Exception):  # It may need the Trainer. The Trainer calls it as well: a deferred model.
                module.configure_model()
        without_values(module, simulation)
        for one in _that_prepare(module, data):  # The Trainer would wait for other ranks around a hook of the user.
            vars(one)["prepare_data"] = partial(DataHooks.prepare_data, one)
        vars(module)["configure_callbacks"] = list  # Callbacks are left out, since some would write files.
        measure = _Measure(simulation, has_own_memory)
        given = {**arguments, **_FIXED, "callbacks": [measure], "logger": DummyLogger()}
        given |= {"devices": num_devices, "num_nodes": num_nodes, **_duration(arguments)}
        given["plugins"] = [*_plugins(arguments), SimulatedEnvironment(num_ranks, num_devices, rank)]
        if has_own_memory:
            given["sync_batchnorm"] = False  # It changes no size, and is refused on a CPU.
        fetch = _on_host(simulation.meter, has_own_memory)(example_step.first_args)
        try:
            # Plans that need a batch fetch it while the strategy is set up.
            with mock.patch.object(example_step, "first_args", fetch):
                Trainer(**given).fit(module, data)
        except Exception:
            if measure.result is None:  # What happens after the measured step does not count.
                raise
        if measure.result is None:
            raise RuntimeError(
                "The training ended before each optimizer had made two steps, of which a dry run measures the second:"
                " it needs more batches."
            )
        return measure.result


def prepare_data(make: Make, num_nodes: int, num_devices: int, backend: str) -> None:
    """Let a module and its data prepare the data as in a real run, with values.

    Dry runs, several of which may run at the same time, then need not do it.

    Args:
        make: As for :func:`dry_run`, like the others.
        num_nodes: Number of nodes.
        num_devices: Number of devices of a node.
        backend: Backend over which the ranks communicate.
    """
    with (
        _quietly(),
        _without_gpus(),
        without_process_group(),
        simulate_rank(num_nodes * num_devices, 0, backend),
    ):
        module, data, _ = make()
    for one in _that_prepare(module, data):
        one.prepare_data()


def _that_prepare(module: LightningModule, data: Any) -> list[Any]:
    return [one for one in (data, module) if isinstance(one, DataHooks)]


@contextmanager
def _on_host(meter: StorageMeter, has_own_memory: bool) -> Iterator[None]:
    """Leave out the tensors that are made in this context, if the device has a memory of its own."""
    before, meter.is_paused = meter.is_paused, has_own_memory
    try:
        yield
    finally:
        meter.is_paused = before


def _duration(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer for the length of the training, from which schedulers are made."""
    max_steps, max_epochs = arguments.get("max_steps"), arguments.get("max_epochs")
    return {
        "max_steps": -1 if max_steps in (None, -1) else max(max_steps, _FEWEST_STEPS),
        "max_epochs": max_epochs if max_epochs in (None, -1) else max(max_epochs, _FEWEST_EPOCHS),
    }


def _plugins(arguments: Mapping[str, Any]) -> list[Any]:
    """Return the plugins of a Trainer for a run on the CPU, without those that the simulation replaces."""
    given = arguments.get("plugins") or []
    plugins = [
        one for one in (given if isinstance(given, list) else [given]) if not isinstance(one, ClusterEnvironment)
    ]
    return [_on_cpu(one) if isinstance(one, MixedPrecision) else one for one in plugins]


def _on_cpu(plugin: MixedPrecision) -> MixedPrecision:
    """Return a plugin with the same dtype for the CPU, on which the tensors of a dry run are."""
    clone = copy.copy(plugin)
    clone.device, clone.scaler = "cpu", None
    return clone


class _Measure(Callback):
    """Measure the second optimizer step.

    Args:
        simulation: The simulation, with the meter.
        has_own_memory: Whether the device has a memory of its own, in which the data are not, but the batch of a step.
    """

    def __init__(self, simulation: SimulatedRank, has_own_memory: bool) -> None:
        self._meter = simulation.meter
        self._counter = simulation.work
        self._has_own_memory = has_own_memory
        self._stepped: set[int] = set()
        """The optimizers that have made a step in the current round, by ``id``."""
        self._num_with_steps = 0
        """Number of the round's batches with a step of an optimizer."""
        self._num_rounds = 0
        self._num_batches = 0
        """Number of batches of the measured round."""
        self._resident = 0
        self._work, self._optimizer = Work(), Work()
        self._batch = BatchSize(0, 0)
        self._batch_bytes = 0
        self.result: DryRun | None = None
        self._meter.is_paused = has_own_memory  # The data are prepared and set up first.

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._meter.is_paused = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.is_paused = self._has_own_memory

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter.is_paused = False
        if self._has_own_memory:
            self._batch_bytes = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
            self._meter.add(self._batch_bytes)
        if self._num_rounds == 0:
            return
        size = batch_size(batch)
        self._batch = BatchSize(self._batch.samples + size.samples, self._batch.tokens + size.tokens)
        if self._num_batches == 0:
            gc.collect()  # What trials of blocks have left in cycles is freed some time later in a real run.
            self._meter.reset_peak()
            self._resident = self._meter.current
        self._num_batches += 1
        self._counter.work = self._work

    @override
    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        if self._counter.work is not None:  # With manual optimization, another optimizer may have stepped before.
            self._counter.work = self._work

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._stepped.add(id(optimizer))
        if self._counter.work is not None:
            self._counter.work = self._optimizer

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._counter.work = None
        self._meter.add(-self._batch_bytes)
        self._batch_bytes = 0
        self._meter.is_paused = self._has_own_memory
        self._num_with_steps += bool(self._stepped)
        has_all = {id(optimizer) for optimizer in trainer.optimizers} <= self._stepped
        if not has_all and self._num_with_steps < _MOST_ROUNDS:
            return
        self._stepped.clear()
        self._num_with_steps = 0
        self._num_rounds += 1
        if self._num_rounds == 2:
            self.result = self._result(trainer.strategy)
            trainer.should_stop = True

    def _result(self, strategy: Any) -> DryRun:
        assert isinstance(strategy, MeshStrategy)
        groups = {**self._work.groups, **self._optimizer.groups}
        return DryRun(
            rank=strategy.global_rank,
            resident=self._resident,
            peak=self._meter.peak,
            work=self._work,
            optimizer=self._optimizer,
            batch=self._batch,
            axes={name: _axes_of(ranks, strategy.layout) for name, ranks in groups.items()},
            num_data_parallel=strategy.layout.num_data_parallel,
            num_microbatches=strategy.settings.get("microbatches") or 1,
            num_batches=self._num_batches,
            fill=_fill(strategy),
        )


def _fill(strategy: MeshStrategy) -> float:
    """Return the time that a stage of a pipeline waits for others, as a fraction of the time that it works."""
    pipeline = strategy.parallel.get(Scheduled)
    if pipeline is None or strategy.layout.pp == 1:
        return 0.0
    if not strategy.parallel.module.automatic_optimization:  # The stages work in turn.
        return strategy.layout.pp - 1.0
    bubble = pipeline.expected_bubble()
    return bubble / (1 - bubble)


def _axes_of(ranks: Sequence[int], layout: ParallelLayout) -> tuple[str, ...]:
    """Return the axes along which some ranks differ, outermost first."""
    found, inner = [], layout.world_size
    for axis, size in layout.sizes.items():
        inner //= size
        if any(rank // inner % size != ranks[0] // inner % size for rank in ranks):
            found.append(axis)
    return tuple(found)


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Hide GPUs in this context: a process that was forked from one that uses them cannot use them."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
    ):
        yield


@contextmanager
def _quietly() -> Iterator[None]:
    """Let Lightning and torch print nothing in this context: a plan has many dry runs, and prints their outcomes."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "torch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
