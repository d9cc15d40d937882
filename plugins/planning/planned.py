"""Hold what is predicted for a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dist.plugins.planning.dry_run import DryRun
from lightning_dist.plugins.planning.layouts import Layout
from lightning_dist.plugins.planning.step_time import (
    StepTime,
    Where,
    peak_flops_per_s,
    predict_step_time,
)
from lightning_dist.run.telemetry.batch import BatchSize

__all__ = ["Planned"]


_NO_BATCH = BatchSize(0, 0)


@dataclass(frozen=True)
class Planned:
    """Hold what a layout needs.

    Args:
        layout: The layout to which the figures belong.
        resident: Bytes of a rank's tensors between two steps, on the rank that needs the most in a step; None: they are
            unknown, because the layout cannot be used.
        peak: The largest number of bytes of a rank's tensors in a step, on any rank; None: as for ``resident``.
        why_not: The reason why it cannot be used, such as the text by which the strategy refuses it; "": it can.
        time: The predicted time of a step; None: it was not predicted.
        batch: Samples and tokens of a rank's batches in a step.
        model_flops: Floating-point operations of a rank in a step, the mean of the stages of a pipeline.
        peak_flops_per_s: Greatest rate of the device in the dtype of most products; 0: it is not known.
        is_estimated: Whether the numbers were derived from those of other layouts, and not from a dry run of this one.
        num_microbatches: Number of parts of a rank's batch that go through a pipeline; 1 without one, or if the numbers
            were derived.
        num_batches: Number of a rank's batches in a step.
    """

    layout: Layout
    resident: int | None = None
    peak: int | None = None
    why_not: str = ""
    time: StepTime | None = None
    batch: BatchSize = _NO_BATCH
    model_flops: float = 0.0
    peak_flops_per_s: float = 0.0
    is_estimated: bool = False
    num_microbatches: int = 1
    num_batches: int = 1

    @classmethod
    def of(cls, layout: Layout, runs: Sequence[DryRun], where: Where | None) -> Planned:
        """Return the prediction for a layout.

        Args:
            layout: The layout that the dry runs had.
            runs: The dry run of a rank of each stage of its pipeline.
            where: What is known of the devices; None: no time is predicted.
        """
        worst = max(runs, key=lambda run: run.peak)
        time = None if where is None else predict_step_time(layout, runs, where)
        peak = 0.0 if where is None else peak_flops_per_s(worst, where)
        model_flops = sum(run.work.model_flops for run in runs) / len(runs)
        return cls(
            layout,
            worst.resident,
            worst.peak,
            time=time,
            batch=runs[0].batch,
            model_flops=model_flops,
            peak_flops_per_s=peak,
            num_microbatches=worst.num_microbatches,
            num_batches=worst.num_batches,
        )

    @property
    def _per_second(self) -> float:
        """Return the number by which the count of a rank's batch is multiplied to get that of all ranks per second."""
        return 0.0 if self.time is None else self.layout.num_data_parallel / self.time.total

    @property
    def rate(self) -> float:
        """Return what tells the faster one of two layouts: samples per second, or batches if they have no samples."""
        return self.samples_per_s or self._per_second

    @property
    def samples_per_s(self) -> float:
        """Return the samples per second of all ranks; 0: the time was not predicted."""
        return self._per_second * self.batch.samples

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of all ranks; 0: the time was not predicted, or the data are not text."""
        return self._per_second * self.batch.tokens

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization, in ``[0, 1]``; 0: the time or the device's rate is not known."""
        if self.time is None or not self.peak_flops_per_s:
            return 0.0
        return self.model_flops / (self.time.total * self.peak_flops_per_s)

    def corrected(self, found: Planned, estimated: Planned) -> Planned:
        """Return the estimate, multiplied by the quotients of what was found and estimated for a similar layout.

        Args:
            found: The prediction of the similar layout by dry runs of its own.
            estimated: The estimate of that similar layout.
        """
        if self.peak is None or not found.peak or not estimated.peak:
            return self
        time = self.time
        if time is not None and found.time is not None and estimated.time is not None:
            time = time.scaled(found.time.total / estimated.time.total)
        factor = found.peak / estimated.peak
        return replace(self, resident=round((self.resident or 0) * factor), peak=round(self.peak * factor), time=time)

    def fits(self, memory: int | None) -> bool:
        """Return whether a rank needs at most 90% of its device.

        Args:
            memory: Bytes of the memory of a device; None: it has no limit.
        """
        return self.peak is not None and (memory is None or self.peak <= 0.9 * memory)
