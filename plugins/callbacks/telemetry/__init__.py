"""Log the speed and memory of a run.

- ``figures``: Gathers the figures of all ranks, and computes the metrics of the run from them.
- ``utilization``: Counts the operations of a batch, and knows the peak of the device.
- ``step_telemetry``: Holds the callback.
"""

from lightning_dist.plugins.callbacks.telemetry.step_telemetry import StepTelemetry

__all__ = ["StepTelemetry"]
