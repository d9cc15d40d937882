"""Provide callbacks that work with any strategy, this package's or Lightning's."""

from lightning_dist.plugins.callbacks.before_processes import BeforeProcesses
from lightning_dist.plugins.callbacks.fault_tolerance import FaultTolerance
from lightning_dist.plugins.callbacks.noise_scale import GradientNoiseScale
from lightning_dist.plugins.callbacks.pretrained import LoadPretrained
from lightning_dist.plugins.callbacks.profile import ProfileSteps
from lightning_dist.plugins.callbacks.progress import RunProgressBar
from lightning_dist.plugins.callbacks.report_to_ray import ReportToRay
from lightning_dist.plugins.callbacks.scale_learning_rate import ScaleLearningRate
from lightning_dist.plugins.callbacks.telemetry import StepTelemetry

__all__ = [
    "BeforeProcesses",
    "FaultTolerance",
    "GradientNoiseScale",
    "LoadPretrained",
    "ProfileSteps",
    "ReportToRay",
    "RunProgressBar",
    "ScaleLearningRate",
    "StepTelemetry",
]
