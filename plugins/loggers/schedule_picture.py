"""Draw a pipeline's step with a row for each rank, and a box with the microbatch's number for each action."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dist.mesh.timeline import Kind, Span, Timeline

__all__ = ["can_draw", "draw_schedule"]

# These are colours of Okabe and Ito's palette, which people with colour blindness can tell apart.
_COLOURS: dict[Kind, tuple[str, str, str]] = {
    "F": ("#56b4e9", "black", "forward"),
    "B": ("#e69f00", "black", "backward"),
    "I": ("#e69f00", "black", "backward, input"),
    "W": ("#009e73", "white", "backward, weights"),
}
_MIN_WIDTH_IN, _MAX_WIDTH_IN, _BOX_IN, _ROW_IN, _DPI = 14.0, 32.0, 0.16, 0.5, 120
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 0.8, 0.2, 0.5, 0.6
_SMALLEST_TEXT = 4.0  # The unit is points.
_BOX_HEIGHT = 0.8  # The unit is the height of a row.
_LIGHTEST = 0.55
"""Fraction of white that is mixed into the colour of a rank's last stage."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_schedule(timeline: Timeline, title: str, path: Path) -> None:
    """Write a PNG of ``timeline``.

    Later stages of a rank are drawn lighter. The microbatch's number is left out where the box is too narrow for it.

    Args:
        timeline: The actions of one step, with times on one clock.
        title: Text above the picture.
        path: PNG file to write.
    """
    # pyplot is avoided, because it keeps figures in memory and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    by_rank = [[span for span in timeline.spans if span.rank == rank] for rank in range(timeline.num_ranks)]
    inner_width = min(max(_MIN_WIDTH_IN, _BOX_IN * max(map(len, by_rank))), _MAX_WIDTH_IN) - _LEFT_IN - _RIGHT_IN
    inner_height = _ROW_IN * timeline.num_ranks
    width, height = inner_width + _LEFT_IN + _RIGHT_IN, inner_height + _TOP_IN + _BOTTOM_IN
    figure = Figure(figsize=(width, height), dpi=_DPI)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (_LEFT_IN / width, _BOTTOM_IN / height, inner_width / width, inner_height / height), facecolor="#f2f2f2"
    )  # The background remains visible where ranks wait: it is the bubble.
    axes.set_xlim(0, 1000 * timeline.makespan)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)

    points_per_ms = 72 * inner_width / (1000 * timeline.makespan)
    for rank, spans in enumerate(by_rank):
        _draw_rank(axes, timeline.start, rank, spans, points_per_ms)
    handles = [
        Patch(color=colour, label=label)
        for kind, (colour, _, label) in _COLOURS.items()
        if any(span.action.kind == kind for span in timeline.spans)
    ]
    if len({span.action.stage for span in timeline.spans}) > timeline.num_ranks:
        handles.append(Patch(color="none", label="(lighter: the rank's later stages)"))
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False, fontsize=9,
        borderaxespad=0.2,
    )  # fmt: skip
    canvas.print_png(path)


def _draw_rank(axes: Any, begin: float, rank: int, spans: Sequence[Span], points_per_ms: float) -> None:
    """Draw the actions of one rank, given the time at which the step begins and the points of a millisecond."""
    from matplotlib.colors import to_rgb

    stages = sorted({span.action.stage for span in spans})
    boxes, faces = [], []
    for span in spans:
        colour, text_colour, _ = _COLOURS[span.action.kind]
        light = _LIGHTEST * stages.index(span.action.stage) / max(1, len(stages) - 1)
        faces.append(tuple(light + (1 - light) * part for part in to_rgb(colour)))
        start, length = 1000 * (span.start - begin), 1000 * (span.end - span.start)
        boxes.append((start, length))
        number = str(span.action.microbatch)
        size = min(9.0, 1.4 * points_per_ms * length / len(number))
        if size >= _SMALLEST_TEXT:
            text_colour = "black" if light > _LIGHTEST / 2 else text_colour
            centre = start + length / 2
            axes.text(centre, rank, number, ha="center", va="center_baseline", fontsize=size, color=text_colour)
    axes.broken_barh(boxes, (rank - _BOX_HEIGHT / 2, _BOX_HEIGHT), facecolors=faces, edgecolor="white", linewidth=0.5)
