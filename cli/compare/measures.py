"""Say which metrics are compared, how the history of each becomes one number, and which number is better.

The names are those that the strategies, the callbacks and the logger share; see ``StepTelemetry``. A metric whose name
ends in ``loss`` is a loss. What else a module logs is shown by its last value, without a judgement.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import fmean, median
from typing import Literal

__all__ = ["MEASURES", "MFU", "PEAK", "Better", "Measure", "is_compared", "is_loss", "losses_first", "measures_of"]

Better = Literal["lower", "higher"] | None


@dataclass(frozen=True)
class Measure:
    """Describe a number that is computed from the history of a metric.

    Args:
        pattern: Name of the metric, in which ``*`` stands for any text.
        statistic: ``last``, ``lowest``, ``highest``, ``median`` or ``mean`` of the values.
        better: Which of two numbers is better; None: neither.
        is_fraction: Whether the number is shown as a percentage.
    """

    pattern: str
    statistic: str
    better: Better = None
    is_fraction: bool = False

    def __call__(self, values: Sequence[float]) -> float:
        """Return the number of a history that is not empty; NaNs count only if they are last, or if all are NaN."""
        if self.statistic == "last":
            return values[-1]
        numbers = [value for value in values if not math.isnan(value)]
        return _STATISTICS[self.statistic](numbers) if numbers else math.nan


_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "lowest": min,
    "highest": max,
    "median": median,
    "mean": fmean,
}

MFU, PEAK = "perf/mfu", "perf/peak_tflops"
"""The utilization of devices, and what it is relative to."""

MEASURES = (
    Measure("perf/tokens_per_s", "median", "higher"),
    Measure("perf/samples_per_s", "median", "higher"),
    Measure("perf/step_ms", "median", "lower"),
    Measure(MFU, "median", "higher", is_fraction=True),
    Measure(PEAK, "last"),
    Measure("perf/data_ms", "median", "lower"),
    Measure("perf/exposed_comm_ms", "median", "lower"),
    Measure("perf/bubble", "median", "lower", is_fraction=True),
    Measure("memory/peak_mib", "highest", "lower"),
    Measure("plan/step_ms_predicted", "last"),
    Measure("plan/step_ms_error", "last", is_fraction=True),
    Measure("comm/inter_node_mib_per_step", "median", "lower"),
    Measure("comm/*_mib_per_step", "median", "lower"),
    Measure("checkpoint/stall_ms", "mean", "lower"),
    Measure("checkpoint/write_s", "mean", "lower"),
    Measure("checkpoint/mib", "last", "lower"),
    Measure("grad/skipped_steps", "last", "lower"),
    Measure("noise/scale", "last"),
)

_ONLY_CURVES = ("grad/norm", "lr-*", "compression/*", "noise/*")
_LOSS = re.compile(r"(^|[/_. -])loss(_step|_epoch)?$", re.IGNORECASE)
_OTHERS_OF_THE_PROJECT = re.compile(r"(perf|memory|comm|checkpoint|compression|grad|noise|plan|system)/|lr-|epoch$")


def is_loss(name: str) -> bool:
    """Return whether a metric is a loss."""
    return _LOSS.search(name) is not None


def is_compared(name: str) -> bool:
    """Return whether a metric is compared, by a number or by its curve."""
    shared = (*(measure.pattern for measure in MEASURES), *_ONLY_CURVES)
    return any(fnmatchcase(name, pattern) for pattern in shared) or _OTHERS_OF_THE_PROJECT.match(name) is None


def measures_of(name: str) -> list[Measure]:
    """Return the numbers that are computed from a metric that is compared."""
    if is_loss(name):
        return [Measure(name, "lowest", "lower"), Measure(name, "last", "lower")]
    for measure in MEASURES:
        if fnmatchcase(name, measure.pattern):
            return [measure]
    return [] if any(fnmatchcase(name, pattern) for pattern in _ONLY_CURVES) else [Measure(name, "last")]


def losses_first(name: str) -> tuple[int, str]:
    """Return a key that sorts metrics: losses (validation first), what else a module logs, then as listed here."""
    if is_loss(name):
        return (0 if name.startswith("val") else 1, name)
    patterns = [*(measure.pattern for measure in MEASURES), *_ONLY_CURVES]
    place = next((index for index, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), -1)
    return (3 + place, name)
