"""Log the gradient noise scale, from which the largest useful batch follows."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_dist.mesh.deferred_read import DeferredRead
from lightning_dist.parallel_module import ParallelModule, parallelized
from lightning_dist.plugins._compat import logging_step
from lightning_dist.plugins.precision import scales_losses
from lightning_dist.run.telemetry import GradientSquares, NoiseScale, NoiseScaleEstimator, batch_size

__all__ = ["GradientNoiseScale"]


class GradientNoiseScale(Callback):
    """Log the gradient noise scale: the global batch, in samples, from which a larger one helps little.

    ====================== ==========================================================================================
    ``noise/scale``        ``tr(S) / |G|^2``, where ``G`` is the gradient of the expected loss, and ``S`` the
                           covariance of the gradient of one sample
    ``noise/scale_low``    the ends of its 95% interval; a figure that is not finite is not logged
    ``noise/scale_high``
    ====================== ==========================================================================================

    It is estimated from the norms of each rank's gradient before it is averaged, and of the mean (McCandlish et al.,
    2018, https://arxiv.org/abs/1812.06162, appendix A.1; see :mod:`lightning_dist.run.telemetry.noise_scale` for the
    estimator and its interval). With ``B`` samples in a step, training takes about ``1 + scale / B`` times the fewest
    possible steps, and ``1 + B / scale`` times the fewest possible samples. Rank 0 prints these numbers at the end of a
    fit.

    A sample is an entry of dimension 0 of a batch's first tensor, and the loss must be a mean over the samples. Steps
    count in which all ranks have equally many samples, and as many batches as ``accumulate_grad_batches``. The norms
    are computed on the device, and the ranks add them up once per interval, in one small tensor that no step waits for.

    Args:
        window: Number of the latest optimizer steps from which the scale is estimated, 20 or more. The scale grows
            while a model is trained, so that a long window lags behind, and a short one gives a wide interval.
        log_every_n_steps: Number of optimizer steps between two logs; None: the Trainer's ``log_every_n_steps``.

    Raises:
        MisconfigurationException: If a number is too small; when training starts, if gradients of single ranks cannot
            be observed, or their norms do not tell the noise.
    """

    def __init__(self, window: int = 100, log_every_n_steps: int | None = None) -> None:
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise MisconfigurationException(
                f"GradientNoiseScale(log_every_n_steps={log_every_n_steps}): expected a positive number of steps, or"
                " None for the Trainer's log_every_n_steps."
            )
        try:
            self._estimator = NoiseScaleEstimator(window)
        except ValueError as error:
            raise MisconfigurationException(f"GradientNoiseScale: {error}") from error
        self.window = window
        self.log_every_n_steps = log_every_n_steps
        self._parallel: ParallelModule | None = None
        self._num_ranks = 1
        self._begin_step(0)

    def _begin_step(self, global_step: int) -> None:
        self._global_step = global_step
        self._squares: Tensor | None = None
        self._num_samples = self._num_batches = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_what_cannot_work(trainer, pl_module)
        parallel = parallelized(pl_module)
        assert parallel is not None
        self._stop()  # A fit that failed may not have ended.
        self._num_ranks = (trainer.distributed_sampler_kwargs or {})["num_replicas"]
        num_stages = trainer.strategy.layout.pp  # type: ignore[attr-defined]
        self._sums = GradientSquares(parallel.groups, trainer.world_size // num_stages, self._num_ranks)
        self._parallel = parallel
        parallel.observe_gradients(self._sums)
        self._estimator = NoiseScaleEstimator(self.window)
        self._rows: list[Tensor] = []
        self._sent: tuple[dist.Work, Tensor, int] | None = None
        self._read: deque[tuple[DeferredRead, int]] = deque()
        self._num_left_out = self._samples_of_step = 0
        self._interval = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._begin_step(trainer.global_step)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._squares = self._sums.take()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, Mapping) and outputs.get("weight") is not None:
            raise MisconfigurationException(
                "GradientNoiseScale with a training_step that returns {'loss': ..., 'weight': ...}: the gradients of"
                " ranks are then no means over equally many samples. Leave one of the two out."
            )
        samples = batch_size(batch).samples
        if not samples:
            raise MisconfigurationException(
                f"GradientNoiseScale with a batch of the type {type(batch).__name__} that holds no tensor: it is not"
                " known how many samples it has. Let the loader return tensors in lists, tuples, mappings or"
                " dataclasses."
            )
        self._num_samples += samples
        self._num_batches += 1
        self._receive(trainer, waits=False)
        if trainer.global_step == self._global_step:
            return
        self._rows.append(self._row(trainer))
        self._begin_step(trainer.global_step)
        step = logging_step(trainer)
        if self._interval and (step + 1) % self._interval == 0:
            self._send(trainer, step)

    def _row(self, trainer: Trainer) -> Tensor:
        """Return the numbers of this rank's step that are added up over the ranks, of shape ``(4,)``.

        They are the two of :meth:`GradientSquares.take`, and the number of samples and its square, to find out whether
        all ranks have equally many. They are NaN if the step has another number of batches than others.
        """
        is_complete = self._squares is not None and self._num_batches == trainer.accumulate_grad_batches
        if self._squares is None:
            self._squares = torch.zeros(2, dtype=torch.float64, device=trainer.strategy.root_device)
        samples = float(self._num_samples) if is_complete else math.nan
        return torch.cat(
            [self._squares, self._squares.new_full((1,), samples), self._squares.new_full((1,), samples**2)]
        )

    def _send(self, trainer: Trainer, step: int) -> None:
        """Begin to add up the interval's numbers over all ranks. This is a collective over all processes."""
        self._receive(trainer, waits=False)
        if not self._rows:
            return
        sums = torch.stack(self._rows)
        self._rows = []
        work = dist.all_reduce(sums, async_op=True)
        assert work is not None
        self._sent = work, sums, step

    def _receive(self, trainer: Trainer, waits: bool) -> None:
        """Log what the ranks have added up.

        Args:
            trainer: Trainer whose loggers are used.
            waits: Whether to wait for sums that have not arrived at the host.
        """
        if self._sent is not None:  # It was begun at the end of an earlier batch.
            (work, sums, step), self._sent = self._sent, None
            work.wait()
            self._read.append((DeferredRead(sums), step))
        while self._read and (waits or self._read[0][0].is_ready):
            read, step = self._read.popleft()
            self._log(trainer, read.result().tolist(), step)

    def _log(self, trainer: Trainer, sums: list[list[float]], step: int) -> None:
        for ranks, mean, samples, squared_samples in sums:
            is_equal = trainer.world_size * squared_samples == samples**2
            if not is_equal or not math.isfinite(ranks + mean):
                self._num_left_out += 1
                continue
            self._samples_of_step = int(samples) * self._num_ranks // trainer.world_size
            of_rank = self._samples_of_step // self._num_ranks
            self._estimator.add(ranks / self._num_ranks, mean, of_rank, self._num_ranks)
        estimate = self._estimator.estimate()
        if estimate is None:
            return
        found = {"noise/scale": estimate.scale, "noise/scale_low": estimate.low, "noise/scale_high": estimate.high}
        metrics = {name: value for name, value in found.items() if math.isfinite(value)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._send(trainer, logging_step(trainer) - 1)
        self._receive(trainer, waits=True)
        estimate = self._estimator.estimate()
        if estimate is not None:
            rank_zero_info(_sentence(estimate, self._samples_of_step))
            return
        left_out = f", and {self._num_left_out} were left out" if self._num_left_out else ""
        rank_zero_warn(
            f"The gradient noise scale is not known: it needs 20 steps in which all ranks have equally many samples,"
            f" accumulate_grad_batches={trainer.accumulate_grad_batches} batches, and finite gradients; there were"
            f" fewer{left_out}."
        )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._parallel is not None:
            self._parallel.observe_gradients(None)
            self._parallel = None


def _sentence(estimate: NoiseScale, samples: int) -> str:
    """Return what the end of a fit says about the noise scale.

    Args:
        estimate: The estimate over the latest steps.
        samples: Number of samples in an optimizer step.
    """
    over = f"Gradient noise scale over the last {estimate.num_steps} steps: "
    if not math.isfinite(estimate.high):
        return (
            f"{over}at least {estimate.low:,.3g} samples (95% interval). It has no upper bound, because the gradient"
            f" cannot be told from its noise with {samples:,} samples in a step: use a longer window or larger batches."
        )
    steps, more = 1 + estimate.scale / samples, 1 + samples / max(estimate.scale, 1e-300)
    return (
        f"{over}{estimate.scale:,.3g} samples (95% interval {estimate.low:,.3g} to {estimate.high:,.3g}). With"
        f" {samples:,} samples in a step, training takes about {steps:.3g} times the fewest possible steps, and"
        f" {more:.3g} times the fewest possible samples."
    )


def _refuse_what_cannot_work(trainer: Trainer, module: LightningModule) -> None:
    """Refuse runs in which gradients of single ranks cannot be observed, or do not tell the noise.

    Raises:
        MisconfigurationException: With the argument that hinders it.
    """
    parallel, strategy = parallelized(module), trainer.strategy
    if parallel is None:
        raise MisconfigurationException(
            f"GradientNoiseScale with {type(strategy).__name__}: only the strategies of lightning_dist let it observe"
            " the gradients of single ranks. Use strategy='data_parallel' in place of 'ddp' or of one device."
        )
    layout, arguments = strategy.layout, strategy.config.arguments  # type: ignore[attr-defined]
    if layout.num_data_parallel == 1:
        raise MisconfigurationException(
            f"GradientNoiseScale with the layout {layout}: there is one data-parallel rank, and the noise is told from"
            " the gradients of two or more. Train on more ranks, or leave the callback out."
        )
    shared = _shared_by_stages(parallel) if layout.pp > 1 else ""
    is_compressed = any(group.reducer is not None for group in parallel.groups)
    every_batch = arguments.reduces_every_batch and trainer.accumulate_grad_batches > 1
    others = [callback for callback in _callbacks(trainer) if isinstance(callback, GradientNoiseScale)]
    reasons = {
        f"pp_size={layout.pp}: {shared}, whose gradients they add up after the average": shared,
        f"cp_size={layout.cp}: ranks have gradients of parts of a sample": layout.cp > 1,
        f"ep_size={layout.ep}: experts have gradients of other ranks' samples": layout.ep > 1,
        f"compression={arguments['compression']}: the mean of the gradients is not exact": is_compressed,
        f"sync={arguments['sync']}: gradients are not averaged over the replicas": arguments["sync"],
        f"zero_stage={arguments['zero_stage']} and accumulate_grad_batches={trainer.accumulate_grad_batches}: the"
        " gradients of each batch are averaged on their own": every_batch,
        f"precision={trainer.precision!r}: gradients are multiplied by a scale that changes": scales_losses(
            trainer.precision_plugin
        ),
        "automatic_optimization = False: it is not known which backwards belong to a step": (
            not module.automatic_optimization
        ),
        "another GradientNoiseScale": len(others) > 1,
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise MisconfigurationException(f"GradientNoiseScale with {reason}. Leave one of the two out.")


def _shared_by_stages(parallel: ParallelModule) -> str:
    """Return a clause that names a parameter that several stages have; "" if there is none. This is a collective."""
    parts = parallel.states.collect_parts({name: None for group in parallel.groups for name in group.names})
    counts = Counter(name for part in parts for name in part)
    return next((f"stages share the parameter {name!r}" for name, count in counts.items() if count > 1), "")


def _callbacks(trainer: Trainer) -> list[Callback]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]
