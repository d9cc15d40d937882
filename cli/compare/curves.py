"""Prepare the histories of metrics for drawing."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_dist.cli.compare.comparison import Comparison
from lightning_dist.cli.compare.reading import Run, Series

_MAX_POINTS = 1000
"""A curve is about as wide as this number of pixels."""


class Curve(NamedTuple):
    """Hold the history of a metric in one run.

    Args:
        column: Index of the column of the run.
        run: The run whose metric the curve shows.
        series: The finite values; of a long history those that make a difference in a drawing.
    """

    column: int
    run: Run
    series: Series


def curves_of(comparison: Comparison) -> dict[str, list[Curve]]:
    """Return the curves of every metric that at least one run has more than one value of."""
    curves = {name: list(_curves(comparison, name)) for name in comparison.metrics}
    return {name: found for name, found in curves.items() if any(len(curve.series.values) > 1 for curve in found)}


def _curves(comparison: Comparison, name: str) -> Iterator[Curve]:
    for index, column in enumerate(comparison.columns):
        for run in column.runs:
            series = run.series.get(name, Series([], [], []))
            finite = _chosen(series, [place for place, value in enumerate(series.values) if math.isfinite(value)])
            if finite.values:
                yield Curve(index, run, thinned(finite))


def thinned(series: Series, max_points: int = _MAX_POINTS) -> Series:
    """Return the lowest and the highest point of each stretch of a long history, and its ends."""
    num_points = len(series.values)
    if num_points <= max_points:
        return series
    stretch = math.ceil(2 * num_points / (max_points - 2))
    places = {0, num_points - 1}
    for start in range(0, num_points, stretch):
        inside = range(start, min(start + stretch, num_points))
        places |= {min(inside, key=series.values.__getitem__), max(inside, key=series.values.__getitem__)}
    return _chosen(series, sorted(places))


def _chosen(series: Series, places: Sequence[int]) -> Series:
    steps, seconds, values = series
    return Series(
        [steps[place] for place in places], [seconds[place] for place in places], [values[place] for place in places]
    )
