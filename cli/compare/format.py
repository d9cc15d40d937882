"""Format the numbers of a comparison as text, for the terminal and for the page."""

import math
import re

from lightning_dist.cli.compare.comparison import Cell, Column, Comparison, Row
from lightning_dist.cli.compare.reading import Run

_MAX_LENGTH = 44
_CLASS_PATH = re.compile(r"\b([a-z_]\w*\.)+(?=[A-Z]\w*\b)")


def number(value: float, is_fraction: bool = False) -> str:
    """Return a number in about four digits, or a fraction as a percentage."""
    if is_fraction and math.isfinite(value):
        return f"{100 * value:.3g}%"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def cell_text(cell: Cell, row: Row, column: Column) -> str:
    """Return the number of a cell, with its spread, and with the number of runs that have it if not all do."""
    if cell.value is None:
        return cell.missing
    text = number(cell.value, row.is_fraction)
    if cell.spread is not None:
        text += f" ± {_spread(cell.spread, row.is_fraction)}"
    return text if cell.num_runs == len(column.runs) else f"{text} ({cell.num_runs} of {len(column.runs)})"


def _spread(value: float, is_fraction: bool) -> str:
    """Return a standard deviation in two digits."""
    if is_fraction:
        return f"{_spread(100 * value, False)}%"
    return f"{value:,.0f}" if 10 <= value < 1e9 else f"{value:.2g}"


def ratio_text(comparison: Comparison, row: Row, index: int) -> str:
    """Return the ratio of a column's number to that of the first column, or an empty string if there is none."""
    ratio = comparison.ratio(row, index)
    return "" if ratio is None else f"{ratio:.2f}x" if 0.1 <= abs(ratio) < 100 else f"{ratio:.2g}x"


def row_label(row: Row) -> str:
    """Return the name of a row."""
    return f"{row.metric} ({row.statistic})" if row.statistic else row.metric


def about_column(column: Column) -> list[str]:
    """Return short lines about a column: its run's ID, status and start, or how many runs it has."""
    if len(column.runs) > 1:
        return [f"{len(column.runs)} runs"]
    run = column.runs[0]
    return [run.id[:8] + ("" if run.status == "FINISHED" else f" {run.status}"), f"{run.started:%Y-%m-%d %H:%M}"]


def about_run(run: Run) -> str:
    """Return one line about a run."""
    ended = "" if run.duration is None else f", took {number(run.duration)} s"
    return f"{run.name}  {run.id}  {run.status}, started {run.started:%Y-%m-%d %H:%M:%S}{ended}"


def shortened(text: str) -> str:
    """Return text on one line: a class without its module, and long text without its middle."""
    line = " ".join(text.split())
    line = _CLASS_PATH.sub("", line)
    return line if len(line) <= _MAX_LENGTH else f"{line[: _MAX_LENGTH - 16]}…{line[-15:]}"
