"""Log the speed and memory of a run.

- ``figures``: Gathers the figures of all ranks, and computes the metrics of the run from them.
- ``nodes``: Computes how much of what ranks send crosses the links between nodes.
- ``utilization``: Counts the operations of a batch, and looks up the peak of the device.
- ``step_telemetry``: Holds the callback.
"""

from lightning_dist.plugins.callbacks.telemetry.step_telemetry import StepTelemetry

__all__ = ["StepTelemetry"]
