"""Compute how the throughput of runs grows with the number of their processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning_dist.cli.compare.measures import measures_of
from lightning_dist.cli.compare.reading import Run

WORLD_SIZE = "dist.world_size"
"""The parameter that holds a run's number of processes."""

TOKENS, SAMPLES = "perf/tokens_per_s", "perf/samples_per_s"


@dataclass(frozen=True)
class Scaling:
    """Hold the throughput of runs with different numbers of processes.

    The efficiency of ``n`` processes is their throughput over ``n / m`` times that of ``m`` processes, the fewest that
    are compared. It is that of weak scaling if the global batch grows with the processes, and of strong scaling if it
    stays the same.

    Args:
        metric: Name of the metric, whose median over a run counts.
        sizes: The numbers of processes, ascending.
        measured: The throughput for each number of processes, the mean over the runs.
        ideal: The throughput for each number of processes if it were proportional to it.
    """

    metric: str
    sizes: Sequence[int]
    measured: Sequence[float]
    ideal: Sequence[float]

    def efficiencies(self, runs: Sequence[Run]) -> list[float]:
        """Return the efficiency of each run that has logged its throughput and its number of processes."""
        each = self.ideal[0] / self.sizes[0]
        return [
            throughput / (each * size)
            for run in runs
            if (size := world_size(run))
            for throughput in _of(run, self.metric)
        ]


def world_size(run: Run) -> int | None:
    """Return the number of processes of a run; None: it has logged none."""
    logged = run.params.get(WORLD_SIZE, "")
    return int(logged) if logged.isdecimal() and int(logged) else None


def scaling_of(runs: Sequence[Run]) -> Scaling | None:
    """Return how the throughput of runs scales; None if it is known for fewer than two numbers of processes.

    Tokens per second count if all runs have logged them that have logged a throughput, else samples per second.
    """
    metric = TOKENS if all(TOKENS in run.series for run in runs if SAMPLES in run.series) else SAMPLES
    found: dict[int, list[float]] = {}
    for run in runs:
        size = world_size(run)
        if size is not None and (throughput := _of(run, metric)):
            found.setdefault(size, []).extend(throughput)
    if len(found) < 2:
        return None
    sizes = sorted(found)
    measured = [fmean(found[size]) for size in sizes]
    return Scaling(metric, sizes, measured, [measured[0] * size / sizes[0] for size in sizes])


def _of(run: Run, metric: str) -> list[float]:
    """Return the number of a run's metric, and nothing if the run has none."""
    (measure,) = measures_of(metric)
    return [measure(run.series[metric].values)] if metric in run.series else []
