"""Run the first steps of a training as one rank of many, on tensors without values, and measure what they need."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_dist._compat import without_process_group
from lightning_dist.mesh.layout import ParallelLayout
from lightning_dist.plugins.planning.environment import SimulatedEnvironment
from lightning_dist.plugins.planning.forked import in_fork
from lightning_dist.plugins.strategies.mesh import MeshStrategy
from lightning_dist.run.simulation import SimulatedRank, Work, simulate_rank, without_values
from lightning_dist.run.telemetry.batch import BatchSize, batch_size

__all__ = ["DryRun", "dry_run", "run_as_rank"]

_FIXED: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": None,
    "max_time": None,
    "limit_train_batches": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "callbacks": None,
    "profiler": None,
}
"""The arguments of a Trainer that a dry run chooses itself."""


@dataclass(frozen=True)
class DryRun:
    """Hold what a rank needs in its second optimizer step, the first one that has the states of optimizers.

    Args:
        rank: The rank.
        resident: Bytes of all tensors when the step begins.
        peak: The largest number of bytes of all tensors in the step.
        work: What the rank computes and sends in forwards and backwards.
        optimizer: What it computes and sends from the begin of the optimizer's step on.
        batch: Samples and tokens of the rank's batches in the step.
        axes: The axes of the mesh over which each process group goes that ``work`` and ``optimizer`` name.
        num_data_parallel: Number of ranks that have different batches.
        num_microbatches: Number of parts of a batch that go through a pipeline; 1 without one.
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


def dry_run(
    make: Callable[[], tuple[LightningModule, Any, Mapping[str, Any]]],
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
    make: Callable[[], tuple[LightningModule, Any, Mapping[str, Any]]],
    num_nodes: int,
    num_devices: int,
    rank: int,
    backend: str,
) -> DryRun:
    """Do what :func:`dry_run` does in this process, in which caches of torch keep traces of it."""
    num_ranks = num_nodes * num_devices
    with _quietly(), without_process_group(), simulate_rank(num_ranks, rank, backend) as simulation:
        module, data, arguments = make()
        with suppress(Exception):  # It may need the Trainer. The Trainer calls it as well, and gets a deferred model.
            module.configure_model()
        without_values(module, simulation)
        accumulated = arguments.get("accumulate_grad_batches") or 1
        measure = _Measure(simulation, accumulated)
        plugins = arguments.get("plugins") or []
        given = {**arguments, **_FIXED, "callbacks": [measure], "max_steps": 2}
        given |= {"devices": num_devices, "num_nodes": num_nodes}
        environment = SimulatedEnvironment(num_ranks, num_devices, rank)
        given["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), environment]
        Trainer(**given).fit(module, data)
        if measure.result is None:
            raise RuntimeError(
                "The training data ended before the second optimizer step: a dry run needs"
                f" {2 * accumulated} batches of a rank."
            )
        return measure.result


class _Measure(Callback):
    """Measure the second optimizer step.

    Args:
        simulation: The simulation, with the meter.
        accumulated: Number of batches of an optimizer step.
    """

    def __init__(self, simulation: SimulatedRank, accumulated: int) -> None:
        self._meter = simulation.meter
        self._counter = simulation.work
        self._accumulated = accumulated
        self._num_batches = 0
        self._resident = 0
        self._work, self._optimizer = Work(), Work()
        self._batch = BatchSize(0, 0)
        self.result: DryRun | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._num_batches >= self._accumulated:
            size = batch_size(batch)
            self._batch = BatchSize(self._batch.samples + size.samples, self._batch.tokens + size.tokens)
            self._counter.work = self._work
        if self._num_batches == self._accumulated:
            gc.collect()  # What trials of blocks have left in cycles is freed some time later in a real run.
            self._meter.reset_peak()
            self._resident = self._meter.current

    @override
    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self._counter.work is not None:
            self._counter.work = self._optimizer

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._counter.work = None
        self._num_batches += 1
        if self._num_batches == 2 * self._accumulated:
            strategy = trainer.strategy
            assert isinstance(strategy, MeshStrategy)
            groups = {**self._work.groups, **self._optimizer.groups}
            self.result = DryRun(
                rank=strategy.global_rank,
                resident=self._resident,
                peak=self._meter.peak,
                work=self._work,
                optimizer=self._optimizer,
                batch=self._batch,
                axes={name: _axes_of(ranks, strategy.layout) for name, ranks in groups.items()},
                num_data_parallel=strategy.layout.num_data_parallel,
                num_microbatches=strategy.settings.get("microbatches") or 1,
            )


def _axes_of(ranks: Sequence[int], layout: ParallelLayout) -> tuple[str, ...]:
    """Return the axes along which some ranks differ, outermost first."""
    found, inner = [], layout.world_size
    for axis, size in layout.sizes.items():
        inner //= size
        if any(rank // inner % size != ranks[0] // inner % size for rank in ranks):
            found.append(axis)
    return tuple(found)


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
