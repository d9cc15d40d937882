"""The table of the families, printed and written into the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.zoo.compare import TOLERANCE, Cell
from tests.zoo.family import Family

__all__ = ["Row", "markdown", "summary", "write_section"]

Row = Mapping[str, Cell]
"""The name of a strategy to its cell."""

BEGIN, END = "<!-- zoo: begin, written by `make zoo` -->", "<!-- zoo: end -->"


def summary(rows: Mapping[str, Row]) -> str:
    """Return one line that counts the cells by what became of them."""
    counts = Counter(cell.status for row in rows.values() for cell in row.values())
    return f"{len(rows)} families: " + ", ".join(f"{number} {status}" for status, number in counts.items())


def markdown(rows: Mapping[str, Row], families: Mapping[str, Family], versions: str) -> str:
    """Return the section of the documentation.

    Args:
        rows: The name of a family to its cells.
        families: The name of a family to the family.
        versions: The versions of the libraries that were used.
    """
    strategies = list(next(iter(rows.values())))
    lines = [
        "## Hugging Face families",
        "",
        "Tiny models with random weights, trained for two steps in float64. `equal`: losses, every gradient of the"
        f" first step and every weight after the last are those of one process, to {TOLERANCE:.0e} of their norm."
        " `pipeline_parallel` has two stages and two microbatches, `tensor_parallel` two ranks, `nd_parallel` two"
        " stages of two ranks. The last column is the fraction of the parameters that `tensor_parallel` splits."
        f" {versions}; run `make zoo` to compare them again.",
        "",
        f"{summary(rows)}.",
        "",
        "| family | kind | " + " | ".join(f"`{name}`" for name in strategies) + " | split |",
        "|---|---|" + "---|" * (len(strategies) + 1),
    ]
    for name, row in rows.items():
        split = f"{row['tensor_parallel'].split:.0%}" if "tensor_parallel" in row else ""
        cells = " | ".join(row[strategy].status for strategy in strategies)
        lines.append(f"| {name} | {families[name].kind} | {cells} | {split} |")
    reasons = list(_reasons(rows, strategies))
    return "\n".join([*lines, *(["", *reasons] if reasons else []), ""])


def _reasons(rows: Mapping[str, Row], strategies: Sequence[str]) -> Iterator[str]:
    for strategy in strategies:
        for name, row in rows.items():
            if row[strategy].text:
                yield f"- {name} under `{strategy}` is {row[strategy]}"


def write_section(path: Path, section: str) -> None:
    """Put ``section`` into the file at ``path`` between markers of its own, and leave the rest of the file as it is."""
    text = path.read_text() if path.exists() else "# Compatibility\n"
    marked = f"{BEGIN}\n{section}{END}\n"
    before, begin, rest = text.partition(BEGIN)
    if begin:
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"{path} has {BEGIN!r} without {END!r}: put that back, or remove both.")
        path.write_text(before + marked + after.removeprefix("\n"))
    else:
        path.write_text(f"{text.rstrip()}\n\n{marked}")
