"""Log the speed and memory of a run in its loggers, and show the speed on its progress bar."""

import math
from functools import partial, wraps
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_dist.mesh.timeline import Timeline
from lightning_dist.parallel_module import parallelized
from lightning_dist.plugins._compat import logging_step, observe_fetching
from lightning_dist.plugins.callbacks.telemetry.figures import RankFigures, gather, num_replicas, summarize
from lightning_dist.plugins.callbacks.telemetry.nodes import inter_node_mib
from lightning_dist.plugins.callbacks.telemetry.utilization import Utilization
from lightning_dist.plugins.loggers.mlflow import MLflowLogger
from lightning_dist.plugins.loggers.schedule_picture import can_draw, draw_schedule
from lightning_dist.run.telemetry import Phase, StepMeter, batch_size, peak_memory_mib
from lightning_dist.techniques.protocol import Scheduled


class StepTelemetry(Callback):
    """Log the time, throughput and memory of training steps once per interval.

    ========================= ============================================================================
    ``perf/step_ms``          time from one optimizer step to the next: the interval's mean, on the slowest rank
    ``perf/data_ms``          the part of it spent waiting for the next batch: the mean over the ranks
    ``perf/forward_ms``       the part spent in forwards, ``perf/backward_ms`` in backwards, which include the reduction
                              of gradients, and ``perf/optimizer_ms`` in the updates, which include clipping
    ``perf/exposed_comm_ms``  the part of these times in which a rank waited for collectives
    ``perf/slowest_rank``     the rank that was busy longest, which the others waited for
    ``perf/busy_ms_...``      ``slowest_rank``, ``fastest_rank``: how long it was busy in a step, without the waits
    ``perf/samples_per_s``    samples of all replicas per second; a batch has as many as dim 0 of its first tensor
    ``perf/tokens_per_s``     tokens of all replicas per second: elements of a batch's first 2-D integer tensor, if any
    ``perf/mfu``              operations that the model needs per second, as a fraction of what the devices can run at
                              most (model FLOPs utilization); ``perf/hfu``: the same with those of recomputation
    ``memory/peak_mib``       peak since the start on the rank that needed most (CUDA: allocated, else resident)
    ``memory/peak_mib_rank0`` the same on rank 0, and so on for each rank, for runs of up to 64 ranks
    ``perf/bubble``           fraction of the time of a pipeline's ranks in which they waited for each other, in the
                              interval's last step; the mean over the replicas
    ``perf/bubble_theory``    the same fraction if all ranks take equally long, and a backward as long as two forwards
    ========================= ============================================================================

    Techniques add figures of their own, the mean over the ranks. ``comm/<axis>_mib_per_step`` is what a rank sends
    along an axis of the mesh, by the formulas of ring collectives: for ``dp_shard`` to gather parameters and to reduce
    gradients inside a replica, for ``dp_replicate`` to average gradients over replicas, for ``tp`` between the ranks
    that split layers, and for ``pp`` between stages. ``comm/inter_node_mib_per_step`` is the part of all of these that
    goes to other nodes. With ``compression``, ``compression/ratio`` is that of an exact all-reduce to what is sent,
    ``compression/ms_per_step`` the time spent compressing on the CPU, ``compression/residual_over_gradient`` the norm
    of a rank's residuals over that of the gradients in the step after the last log, and ``grad/skipped_steps`` the
    number of steps that were skipped so far.

    Once per run, an :class:`~lightning_dist.plugins.loggers.MLflowLogger` gets a picture of the pipeline's step as the
    artifact ``pipeline/schedule.png``.

    The first step after a start is left out, because it includes initializations, and because its operations are
    counted while it runs. The time of validation, of saving checkpoints and between epochs is left out as well. The
    device is synchronized once per interval, and the ranks exchange one small tensor, or two with a pipeline.

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
        self._meter = StepMeter(torch.device("cpu"))
        self._handles: list[RemovableHandle] = []
        self._between: Phase | None = None
        """The phase between a backward and an update, and after it: manual optimization is in ``training_step``."""
        self._interval = 0
        self._samples = 0
        self._tokens = 0
        self._global_step = 0
        self._logging_step = 0
        self._warm = False
        self._has_drawn = False
        self._utilization: Utilization | None = None
        self._trainer: Trainer | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer is not self._trainer:
            self._trainer = trainer
            self._leave_out_checkpoints(trainer)
            observe_fetching(trainer, self._before_fetch, self._after_fetch)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_measuring()  # A fit that failed may not have ended.
        self._meter = StepMeter(trainer.strategy.root_device)
        self._meter.start()
        self._between = None if pl_module.automatic_optimization else "forward"
        # Lightning wraps the optimizers for users; the hooks belong to torch's own.
        self._handles = [
            optimizer.register_step_post_hook(lambda *args: self._meter.enter(self._between))
            for optimizer in trainer.optimizers
            if isinstance(optimizer, Optimizer)
        ]
        self._samples = self._tokens = 0
        self._warm = self._has_drawn = False
        self._utilization = None
        self._global_step = trainer.global_step
        self._interval = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter.begin_step(count_waits=self._is_last_of_interval(logging_step(trainer)))
        if self._utilization is None and self._interval:
            self._utilization = Utilization(trainer, pl_module)
            self._utilization.begin_count()
        self._meter.enter("forward")

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._meter.enter("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.enter(self._between)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._meter.enter("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._meter.enter(None)
        if self._utilization is not None:
            self._utilization.end_count(batch)
        stepped, self._global_step = trainer.global_step > self._global_step, trainer.global_step
        if not self._warm:
            self._warm = stepped
            if stepped:
                self._meter.resume()
                _figures_of_techniques(pl_module, 1)  # This drops the figures of the first step.
            return
        samples, tokens = batch_size(batch)
        self._samples += samples
        self._tokens += tokens
        if not stepped:
            return
        self._meter.step()
        self._logging_step = logging_step(trainer)
        if self._is_last_of_interval(self._logging_step):
            self._report(trainer, pl_module, on_progress_bar=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.pause()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.pause()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.pause()
        if self._interval:
            self._report(trainer, pl_module, on_progress_bar=False)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_measuring()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_measuring()

    def _stop_measuring(self) -> None:
        self._meter.close()
        if self._utilization is not None:
            self._utilization.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _is_last_of_interval(self, step: int) -> bool:
        return self._interval > 0 and (step + 1) % self._interval == 0

    def _report(self, trainer: Trainer, pl_module: LightningModule, on_progress_bar: bool) -> None:
        times = self._meter.lap()
        samples, self._samples = self._samples, 0
        tokens, self._tokens = self._tokens, 0
        if times.num_steps == 0 or self._utilization is None:
            return
        device, parallel = trainer.strategy.root_device, parallelized(pl_module)
        # Only this package's strategies wait for collectives in places where the wait can be observed.
        waits = math.nan if parallel is None or trainer.world_size == 1 else times.waits
        phases = times.phases
        pipeline = None if parallel is None else parallel.get(Scheduled)
        timeline = None if pipeline is None else pipeline.timeline()
        if timeline is not None:  # Forwards and backwards alternate in training_step.
            scale = times.num_steps * trainer.accumulate_grad_batches / timeline.num_ranks
            phases["forward"], phases["backward"] = scale * timeline.seconds("F"), scale * timeline.seconds("BIW")
        own = RankFigures(
            seconds=times.seconds,
            data=phases["data"],
            forward=phases["forward"],
            backward=phases["backward"],
            optimizer=phases["optimizer"],
            waits=waits,
            samples=samples,
            tokens=tokens,
            peak_mib=peak_memory_mib(device),
            bubble=math.nan if timeline is None else timeline.bubble,
            **self._utilization.figures(samples, tokens),
        )
        of_techniques = _figures_of_techniques(pl_module, times.num_steps)
        ranks, others = gather(own, list(of_techniques.values()), device)
        metrics = summarize(ranks, times.num_steps, num_replicas(trainer))
        for index, name in enumerate(of_techniques):
            metrics[name] = fmean(rank[index] for rank in others)
        layout = getattr(trainer.strategy, "layout", None)
        if layout is not None and trainer.num_nodes > 1:
            metrics["comm/inter_node_mib_per_step"] = inter_node_mib(metrics, layout, trainer.num_devices)
        if pipeline is not None and timeline is not None:
            metrics["perf/bubble_theory"] = pipeline.expected_bubble()
            self._draw(trainer, timeline, f"{pipeline.schedule}, step {self._logging_step}", metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._logging_step)
        if on_progress_bar:
            rate = "tokens" if "perf/tokens_per_s" in metrics else "samples"
            shown = {
                f"{rate}/s": metrics.get(f"perf/{rate}_per_s"),
                "mfu": metrics.get("perf/mfu"),
                "replicas": metrics.get("elastic/replicas"),
            }
            for name, value in shown.items():
                if value is not None:
                    pl_module.log(name, value, prog_bar=True, logger=False)

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
            was_running = self._meter.pause()
            try:
                save_checkpoint(*args, **kwargs)
            finally:
                if was_running:
                    self._meter.resume()

        trainer.save_checkpoint = timed  # type: ignore[method-assign]

    def _before_fetch(self) -> None:
        if self._warm:
            self._meter.resume()
            self._meter.enter("data")

    def _after_fetch(self) -> None:
        self._meter.enter(None)


def _figures_of_techniques(pl_module: LightningModule, num_steps: int) -> dict[str, float]:
    """Return the figures of this rank about the steps since the last call."""
    parallel = parallelized(pl_module)
    return {} if parallel is None else parallel.metrics(num_steps)
