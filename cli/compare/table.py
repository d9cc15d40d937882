"""Print a comparison in the terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dist.cli.compare.comparison import Comparison
from lightning_dist.cli.compare.format import about_column, cell_text, ratio_text, row_label, shortened

_BEST = "*"
_PADDING = 3
"""Columns of the terminal between two columns of the table."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the parameters that differ and the metrics, in several tables if the columns do not fit side by side.

    Args:
        comparison: The runs and rows to print.
        console: The terminal, whose width decides how many columns fit.
    """
    metrics = _aligned_cells(comparison)
    names = [name for name, _ in comparison.parameters] + [row_label(row) for row in comparison.rows]
    width_of_names = max(map(len, names), default=0)
    widths = [_width(comparison, metrics, index) for index in range(len(comparison.columns))]
    for indexes in _blocks(widths, console.width - width_of_names):
        console.print(_table(comparison, metrics, indexes))
        console.print()
    for note in (*comparison.notes, _legend(comparison)):
        console.print(note, highlight=False)


def _table(comparison: Comparison, metrics: Sequence[Sequence[Text]], indexes: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _PADDING, 0, 0), show_header=False)
    table.add_column(overflow="fold")
    for _ in indexes:
        table.add_column(overflow="fold")
    columns = [comparison.columns[index] for index in indexes]
    heading = comparison.grouped_by or ""
    table.add_row(Text(heading, "bold"), *(Text(column.label, "bold") for column in columns))
    for lines in zip(*_same_length([about_column(column) for column in columns]), strict=True):
        table.add_row("", *(Text(line, "dim") for line in lines))
    for name, texts in comparison.parameters:
        if name != comparison.grouped_by:
            table.add_row(Text(name), *(Text(shortened(texts[index])) for index in indexes))
    table.add_row()
    for row, cells in zip(comparison.rows, metrics, strict=True):
        table.add_row(Text(row_label(row)), *(cells[index] for index in indexes))
    return table


def _same_length(columns: Sequence[list[str]]) -> Iterator[list[str]]:
    longest = max(map(len, columns))
    return (lines + [""] * (longest - len(lines)) for lines in columns)


def _aligned_cells(comparison: Comparison) -> list[list[Text]]:
    """Return the cells of the metrics, in which numbers, marks and ratios of a column stand below each other."""
    columns = []
    for index, column in enumerate(comparison.columns):
        numbers = [cell_text(row.cells[index], row, column) for row in comparison.rows]
        ratios = [ratio_text(comparison, row, index) for row in comparison.rows]
        widths = [max(map(len, texts), default=0) for texts in (numbers, ratios)]
        columns.append(
            [
                _cell(text.rjust(widths[0]), ratio.rjust(widths[1]), comparison.is_best(row, index))
                for text, ratio, row in zip(numbers, ratios, comparison.rows, strict=True)
            ]
        )
    return [list(cells) for cells in zip(*columns, strict=True)]


def _cell(text: str, ratio: str, is_best: bool) -> Text:
    cell = Text(f"{text} {_BEST if is_best else ' '}", "bold green" if is_best else "", no_wrap=True)
    return cell.append(f" {ratio}", "not bold dim") if ratio.strip() else cell


def _width(comparison: Comparison, metrics: Sequence[Sequence[Text]], index: int) -> int:
    column = comparison.columns[index]
    texts = [column.label, *about_column(column), *(shortened(texts[index]) for _, texts in comparison.parameters)]
    return max([*map(len, texts), *(row[index].cell_len for row in metrics)]) + _PADDING


def _blocks(widths: Sequence[int], space: int) -> Iterator[list[int]]:
    """Yield which columns stand side by side; the first one, with which the others are compared, is in every block."""
    block, used = [0], widths[0]
    for index in range(1, len(widths)):
        if used + widths[index] > space and len(block) > 1:
            yield block
            block, used = [0], widths[0]
        block.append(index)
        used += widths[index]
    yield block


def _legend(comparison: Comparison) -> Text:
    parts = []
    if any(comparison.is_best(row, index) for row in comparison.rows for index in range(len(comparison.columns))):
        parts.append(f"{_BEST} the best")
    if len(comparison.columns) > 1:
        parts.append(f"2.00x twice that of {comparison.columns[0].label}")
    if any(cell.spread is not None for row in comparison.rows for cell in row.cells):
        parts.append("± standard deviation")
    if any(cell.value is None for row in comparison.rows for cell in row.cells):
        parts.append("- not logged")
    return Text("; ".join(parts), "dim")
