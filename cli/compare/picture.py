"""Draw the curves of a comparison as a PNG."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_dist.cli.compare.colours import ON_LIGHT, dashes_of
from lightning_dist.cli.compare.comparison import Comparison
from lightning_dist.cli.compare.curves import Curve, curves_of
from lightning_dist.cli.compare.measures import is_loss
from lightning_dist.cli.compare.scaling import Scaling

_NUM_IN_ROW, _WIDTH_IN, _HEIGHT_IN, _LEGEND_IN, _DPI = 3, 4.6, 2.9, 0.55, 110
_WIDE = 1.3
"""Width of a line, in points."""
_ALPHA = 0.85
"""Opacity of a line, below 1 so that another one below it can be seen."""
_IDEAL, _MEASURED = "#7f7f7f", "#1c2024"
_MAX_MARKED = 30
"""Greatest number of points of a curve that are marked by dots."""


def draw_curves(comparison: Comparison, path: Path) -> None:
    """Write a PNG with the curve of every metric over steps; losses are drawn over time too.

    If groups differ in their number of processes, the ideal and the measured throughput come first.

    Args:
        comparison: The runs and metrics to draw.
        path: The PNG file to write; an existing one is replaced.

    Raises:
        ValueError: If matplotlib is not installed, or if no run has a curve.
    """
    try:
        # pyplot is avoided, because it keeps figures in memory and looks for a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise ValueError('--png needs matplotlib: pip install "lightning-dist[cli]"') from error

    plots: list[Callable[[Any], None]] = [
        partial(_draw, name=name, axis=axis, curves=curves)
        for name, curves in curves_of(comparison).items()
        for axis in (("step", "seconds") if is_loss(name) else ("step",))
    ]
    if comparison.scaling is not None:
        plots.insert(0, partial(_draw_scaling, scaling=comparison.scaling))
    if not plots:
        raise ValueError(f"--png={str(path)!r}: no run has a metric of which more than one value was logged.")
    num_rows = -(-len(plots) // _NUM_IN_ROW)
    height = num_rows * _HEIGHT_IN + _LEGEND_IN
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - _LEGEND_IN / height), h_pad=0.1, w_pad=0.08)
    figure = Figure(figsize=(_NUM_IN_ROW * _WIDTH_IN, height), dpi=_DPI, layout=layout)
    canvas = FigureCanvasAgg(figure)
    places = list(figure.subplots(num_rows, _NUM_IN_ROW, squeeze=False).flat)
    for axes, draw in zip(places, plots, strict=False):
        draw(axes)
    for axes in places[len(plots) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], label=column.label, **_style(index)) for index, column in enumerate(comparison.columns)]
    figure.legend(handles=handles, loc="upper center", ncols=min(len(handles), 6), frameon=False)
    canvas.print_png(path)


def _draw(axes: Any, name: str, axis: str, curves: Sequence[Curve]) -> None:
    for curve in curves:
        series = curve.series
        is_short = len(series.values) <= _MAX_MARKED
        axes.plot(
            series.steps if axis == "step" else series.seconds,
            series.values,
            marker="o" if is_short else None,
            markersize=3,
            alpha=_ALPHA,
            **_style(curve.column),
        )
    _finish(axes, name, "step" if axis == "step" else "seconds since the first metric")


def _draw_scaling(axes: Any, scaling: Scaling) -> None:
    """Draw the ideal and the measured throughput over the number of processes."""
    axes.plot(scaling.sizes, scaling.ideal, color=_IDEAL, linewidth=_WIDE, linestyle=(0, (6, 3)), label="ideal")
    axes.plot(scaling.sizes, scaling.measured, color=_MEASURED, linewidth=_WIDE, marker="o", label="measured")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xticks(scaling.sizes)
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    _finish(axes, scaling.metric, "processes")


def _finish(axes: Any, title: str, of_x: str) -> None:
    """Name a plot and its horizontal axis, and give it the style of all plots."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(of_x, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _style(column: int) -> dict[str, Any]:
    dashes = dashes_of(column)
    return {
        "color": ON_LIGHT[column % len(ON_LIGHT)],
        "linewidth": _WIDE,
        "linestyle": (0, dashes) if dashes else "-",
    }
