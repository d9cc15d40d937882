"""Log the use of a node's processors, memory, disks, network and GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.plugins.loggers.spool import Entry
from lightning_dist.run.tracking_uri import absolute_uri

if TYPE_CHECKING:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

__all__ = ["NodeMetrics"]


class NodeMetrics:
    """Sample MLflow's system metrics of a node in the background, every 10 s.

    MLflow's own monitor ends itself when the server cannot be reached, and counts samples from 0 in every process. Only
    what it measures is used; the values go through the spool, at the step of the training.

    Args:
        node: Index of the node, which becomes a part of the metrics' names: ``system/node0/...``.
        tracking_uri: URI of the store, for which MLflow's monitor makes a client that is not used.
        put: Function that logs an entry.
        step: Function that returns the optimizer step.
    """

    def __init__(self, node: int, tracking_uri: str, put: Callable[[Entry], None], step: Callable[[], int]) -> None:
        self._tracking_uri = absolute_uri(tracking_uri)
        self._node = node
        self._put = put
        self._step = step
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="mlflow_system_metrics", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        try:
            self._sample_until_end()
        except Exception as error:
            rank_zero_warn(f"No more system metrics of node {self._node} are logged: {error!r}")

    def _sample_until_end(self) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(run_id=None, tracking_uri=self._tracking_uri)
        while not self._is_ending.wait(monitor.sampling_interval):
            self._put(self._entry(monitor))
        self._put(self._entry(monitor))

    def _entry(self, monitor: SystemMetricsMonitor) -> Entry:
        monitor.collect_metrics()
        values = monitor.aggregate_metrics()
        for part in monitor.monitors:
            part.clear_metrics()
        now_ms, step = int(time.time() * 1000), self._step()
        return {"metrics": [[f"system/node{self._node}/{name}", value, now_ms, step] for name, value in values.items()]}

    def close(self) -> None:
        """Log a last sample, and end the thread."""
        self._is_ending.set()
        self._thread.join()
