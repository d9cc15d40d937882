"""Measure time, samples, tokens, peak memory and the noise of gradients of training steps."""

from lightning_dist.run.telemetry.batch import BatchSize, batch_size
from lightning_dist.run.telemetry.flops import FlopCounter, Flops
from lightning_dist.run.telemetry.gradient_squares import GradientSquares
from lightning_dist.run.telemetry.memory import bytes_in_use, peak_bytes_since, peak_memory_mib, reset_peak
from lightning_dist.run.telemetry.noise_scale import NoiseScale, NoiseScaleEstimator
from lightning_dist.run.telemetry.peak import Peak, peak_of
from lightning_dist.run.telemetry.phases import Phase, PhaseTimer
from lightning_dist.run.telemetry.step_meter import StepMeter, StepTimes
from lightning_dist.run.telemetry.step_timer import StepTimer, Stopwatch

__all__ = [
    "BatchSize",
    "FlopCounter",
    "Flops",
    "GradientSquares",
    "NoiseScale",
    "NoiseScaleEstimator",
    "Peak",
    "Phase",
    "PhaseTimer",
    "StepMeter",
    "StepTimer",
    "StepTimes",
    "Stopwatch",
    "batch_size",
    "bytes_in_use",
    "peak_bytes_since",
    "peak_memory_mib",
    "peak_of",
    "reset_peak",
]
