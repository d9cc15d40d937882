"""Measure what grows with the number of ranks, and print a table; ``--write`` puts it into docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

RANKS = (8, 64, 1024, 4096, 16384)
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"

Row = tuple[str, tuple[str, ...], Callable[[Mapping[str, float]], str], str]

ROWS: tuple[Row, ...] = (
    ("set-up of `full_shard`", ("set_up", "full_shard"), lambda of: f"{of['seconds']:.2f} s, {of['mib']:.0f} MiB",
     "ranks, once (see below)"),
    ("set-up of `hybrid_shard` by 8", ("set_up", "hybrid_shard"),
     lambda of: f"{of['seconds']:.2f} s, {of['mib']:.0f} MiB", "ranks, groups of the mesh"),
    ("process groups, `full_shard`", ("set_up", "full_shard"), lambda of: f"{of['groups']}", "axes"),
    ("process groups, `hybrid_shard`", ("set_up", "hybrid_shard"), lambda of: f"{of['groups']}", "axes"),
    ("order of 10 million samples", ("sampler",), lambda of: f"{of['seconds']:.1f} s, {of['bytes']:.1f} B a sample",
     "samples"),
    ("manifest", ("manifest",), lambda of: f"{of['mib']:.2f} MiB", "tensors + files"),
    ("of which sizes and digests of files", ("manifest",), lambda of: f"{of['files_mib']:.2f} MiB", "files"),
    ("merge and encode it (first rank)", ("manifest",), lambda of: f"{of['encode_s']:.2f} s", "tensors + files"),
    ("decode it (every rank)", ("manifest",), lambda of: f"{of['decode_s']:.2f} s, {of['peak_mib']:.0f} MiB",
     "tensors + files"),
    ("find an eighth of a weight", ("manifest",), lambda of: f"{1000 * of['find_s']:.0f} ms", "parts needed"),
    ("stop request of a step", ("stop_requests",), lambda of: f"{of['messages']} all-reduce, {of['bytes']} B",
     "log(ranks) rounds"),
)  # fmt: skip


def measured(measure: tuple[str, ...], num_ranks: int) -> dict[str, float]:
    """Return the figures of :mod:`tests.growth.measure`, from a process of their own."""
    command = [sys.executable, "-m", "tests.growth.measure", measure[0], str(num_ranks), *measure[1:]]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def table() -> Iterator[str]:
    """Measure everything, and yield the lines of the table."""
    kinds = dict.fromkeys(measure for _, measure, _, _ in ROWS)
    figures = {measure: {number: measured(measure, number) for number in RANKS} for measure in kinds}
    yield "| ranks | " + " | ".join(f"{number:,}" for number in RANKS) + " | grows with |"
    yield "|---" * (len(RANKS) + 2) + "|"
    for name, measure, shown, grows in ROWS:
        cells = [shown(figures[measure][number]) for number in RANKS]
        yield f"| {name} | {' | '.join(cells)} | {grows} |"


def main() -> None:
    """Print the table, and with ``--write`` replace the one in the documentation."""
    parser = argparse.ArgumentParser("python -m tests.growth", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    options = parser.parse_args()
    lines = list(table())
    print("\n".join(lines))
    if options.write:
        content, number = re.subn(
            r"(## Growth with the number of ranks\n.*?\n\n)\| ranks .*?(\n\n)",
            lambda found: found[1] + "\n".join(lines) + found[2],
            PAGE.read_text(),
            count=1,
            flags=re.DOTALL,
        )
        assert number == 1, "the page has no such section"
        PAGE.write_text(content)


if __name__ == "__main__":
    main()
