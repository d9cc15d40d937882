"""Log the speed and memory of a run in its loggers, and show the speed on its progress bar."""

import math
from functools import partial, wraps
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_dist.parallel_module import parallelized
from lightning_dist.pipeline import Pipeline, Timeline, simulate
from lightning_dist.plugins._compat import logging_step, observe_fetching
from lightning_dist.plugins.loggers.mlflow import MLflowLogger
from lightning_dist.plugins.loggers.schedule_picture import can_draw, draw_schedule
from lightning_dist.telemetry import StepTimer, Stopwatch, batch_size, peak_memory_mib

_MAX_RANKS_LISTED = 64


class StepTelemetry(Callback):
    """Log the time, throughput and memory of training steps once per interval.

    ========================= ============================================================================
    ``perf/step_ms``          time from one optimizer step to the next: the interval's mean, on the slowest rank
    ``perf/data_ms``          the part of it spent waiting for the next batch, on the rank that waited longest
    ``perf/samples_per_s``    samples of all replicas per second; a batch has as many as dim 0 of its first tensor
    ``perf/tokens_per_s``     tokens of all replicas per second: elements of a batch's first 2-D integer tensor, if any
    ``memory/peak_mib``       peak since the start on the rank that needed most (CUDA: allocated, else resident)
    ``memory/peak_mib_rank0`` the same on rank 0, and so on for each rank, for runs of up to 64 ranks
    ``perf/bubble``           fraction of the time of a pipeline's ranks in which they waited for each other, in the
                              interval's last step; the mean over the replicas
    ``perf/bubble_theory``    the same fraction if all ranks take equally long, and a backward as long as two forwards
    ========================= ============================================================================

    Techniques add figures of their own, the mean over the ranks: with sharding, ``comm/dp_shard_mib_per_step`` is what
    a rank sends to gather parameters and to reduce gradients inside a replica, by the formulas of ring collectives;
    with ``compression`` or ``sync``, ``comm/dp_replicate_mib_per_step`` is what it sends to other replicas; with
    ``compression``,
    ``compression/ratio`` is that of an exact all-reduce to it, ``compression/ms_per_step`` the time spent compressing
    on the CPU, ``compression/residual_over_gradient`` the norm of a rank's residuals over that of the gradients in the
    step after the last log, and ``grad/skipped_steps`` the number of steps that were skipped so far.

    Once per run, an :class:`~lightning_dist.plugins.loggers.MLflowLogger` gets a picture of the pipeline's step as the
    artifact ``pipeline/schedule.png``.

    The first step after a start is left out, because it includes initializations. The time of validation, of saving
    checkpoints and between epochs is left out as well. The device is synchronized once per interval, and the ranks
    exchange one small tensor, or two with a pipeline.

    Args:
        log_every_n_steps: Number of optimizer steps in an interval; None: the Trainer's ``log_every_n_steps``.

    Raises:
        MisconfigurationException: If ``log_every_n_steps`` is not positive.
    """

    def __init__(self, log_every_n_steps: int | None = None) -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise MisconfigurationException(
                f"StepTelemetry(log_every_n_steps={log_every_n_steps}): expected a positive number of steps, or None "
                "for the Trainer's log_every_n_steps."
            )
        self.log_every_n_steps = log_every_n_steps
        self._timer = StepTimer()
        self._data_watch = Stopwatch()
        self._interval = 0
        self._samples = 0
        self._tokens = 0
        self._global_step = 0
        self._logging_step = 0
        self._warm = False
        self._has_drawn = False
        self._trainer: Trainer | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer is not self._trainer:
            self._trainer = trainer
            self._leave_out_checkpoints(trainer)
            observe_fetching(trainer, self._before_fetch, self._after_fetch)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        self._timer = StepTimer(lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else StepTimer()
        self._data_watch = Stopwatch()
        self._samples = self._tokens = 0
        self._warm = self._has_drawn = False
        self._global_step = trainer.global_step
        self._interval = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped, self._global_step = trainer.global_step > self._global_step, trainer.global_step
        if not self._warm:
            self._warm = stepped
            if stepped:
                self._timer.resume()
                _figures_of_techniques(pl_module, 1)  # Those of the first step are left out as well.
            return
        samples, tokens = batch_size(batch)
        self._samples += samples
        self._tokens += tokens
        if not stepped:
            return
        self._timer.step()
        self._logging_step = logging_step(trainer)
        if self._interval and (self._logging_step + 1) % self._interval == 0:
            self._report(trainer, pl_module, on_progress_bar=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.pause()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.pause()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timer.pause()
        if self._interval:
            self._report(trainer, pl_module, on_progress_bar=False)

    def _report(self, trainer: Trainer, pl_module: LightningModule, on_progress_bar: bool) -> None:
        steps, seconds = self._timer.lap()
        data_seconds = self._data_watch.lap()
        samples, self._samples = self._samples, 0
        tokens, self._tokens = self._tokens, 0
        if steps == 0:
            return
        device = trainer.strategy.root_device
        pipeline = _pipeline(pl_module)
        timeline = None if pipeline is None else pipeline.runner.timeline(pipeline.group)
        bubble = math.nan if timeline is None else timeline.bubble
        own_metrics = _figures_of_techniques(pl_module, steps)
        values = [seconds, data_seconds, samples, tokens, peak_memory_mib(device), bubble]
        gathered = _gather([*values, *own_metrics.values()], device)
        ranks = [own[: len(values)] for own in gathered]
        metrics = _summarize([own[:-1] for own in ranks], steps, _num_replicas(trainer))
        for index, name in enumerate(own_metrics, start=len(values)):
            metrics[name] = fmean(own[index] for own in gathered)
        if pipeline is not None and timeline is not None:
            metrics["perf/bubble"] = fmean(own[-1] for own in ranks)
            metrics["perf/bubble_theory"] = simulate(pipeline.runner.order).bubble
            self._draw(trainer, timeline, f"{pipeline.config.schedule}, step {self._logging_step}", metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._logging_step)
        if on_progress_bar:
            for name, unit in (("perf/tokens_per_s", "tokens/s"), ("perf/samples_per_s", "samples/s")):
                if name in metrics:
                    pl_module.log(unit, round(metrics[name]), prog_bar=True, logger=False)
                    break

    def _draw(self, trainer: Trainer, timeline: Timeline, name: str, metrics: dict[str, float]) -> None:
        """Log a picture of rank 0's pipeline with every MLflowLogger, once per run."""
        if self._has_drawn or not trainer.is_global_zero or not can_draw():
            return
        self._has_drawn = True
        title = f"{name}: bubble {timeline.bubble:.1%}; by the schedule {metrics['perf/bubble_theory']:.1%}"
        for logger in trainer.loggers:
            if isinstance(logger, MLflowLogger):
                logger.log_file(partial(draw_schedule, timeline, title), "pipeline/schedule.png")

    def _leave_out_checkpoints(self, trainer: Trainer) -> None:
        """Pause the timer while any caller saves a checkpoint, for which callbacks have no hook."""
        save_checkpoint = trainer.save_checkpoint

        @wraps(save_checkpoint)
        def timed(*args: Any, **kwargs: Any) -> None:
            was_running = self._timer.pause()
            try:
                save_checkpoint(*args, **kwargs)
            finally:
                if was_running:
                    self._timer.resume()

        trainer.save_checkpoint = timed  # type: ignore[method-assign]

    def _before_fetch(self) -> None:
        if self._warm:
            self._timer.resume()
            self._data_watch.start()

    def _after_fetch(self) -> None:
        self._data_watch.stop()


def _pipeline(pl_module: LightningModule) -> Pipeline | None:
    parallel = parallelized(pl_module)
    return None if parallel is None else parallel.get(Pipeline)


def _figures_of_techniques(pl_module: LightningModule, num_steps: int) -> dict[str, float]:
    """Return the figures of this rank about the steps since the last call."""
    parallel = parallelized(pl_module)
    return {} if parallel is None else parallel.metrics(num_steps)


def _gather(values: list[float], device: torch.device) -> list[list[float]]:
    """Return every rank's values, indexed by rank. This is a collective over all processes."""
    mine = torch.tensor(values, device=device)
    if not (dist.is_available() and dist.is_initialized()):
        return [mine.tolist()]
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    gathered: list[list[float]] = torch.stack(ranks).tolist()
    return gathered


def _summarize(ranks: list[list[float]], steps: int, num_replicas: int) -> dict[str, float]:
    """Compute the run's metrics from every rank's ``[seconds, data_seconds, samples, tokens, peak_mib]``."""
    seconds, data_seconds, samples, tokens, peak_mib = zip(*ranks, strict=True)
    slowest = max(seconds)
    metrics = {
        "perf/step_ms": 1000 * slowest / steps,
        "perf/data_ms": 1000 * max(data_seconds) / steps,
        "memory/peak_mib": max(peak_mib),
    }
    # Ranks that share a replica (by tensor or pipeline parallelism) get the same batch, which counts once.
    share = num_replicas / len(ranks)
    if sum(samples):
        metrics["perf/samples_per_s"] = share * sum(samples) / slowest
    if sum(tokens):
        metrics["perf/tokens_per_s"] = share * sum(tokens) / slowest
    if 1 < len(ranks) <= _MAX_RANKS_LISTED:
        metrics |= {f"memory/peak_mib_rank{rank}": peak for rank, peak in enumerate(peak_mib)}
    return metrics


def _num_replicas(trainer: Trainer) -> int:
    kwargs = trainer.distributed_sampler_kwargs or {}
    return int(kwargs.get("num_replicas", trainer.world_size))
