"""Train Hugging Face families under every strategy, and compare each with one process."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import transformers

from tests.pool import WorkerPool, fork_server
from tests.zoo.compare import Cell, compare
from tests.zoo.families import FAMILIES
from tests.zoo.family import Family
from tests.zoo.results import Results
from tests.zoo.run import STRATEGIES, run
from tests.zoo.table import Row, markdown, summary, write_section

MAX_REFUSED = {"pipeline_parallel": 1, "nd_parallel": 1, "context_parallel": 30}
"""Number of families that each strategy may refuse; the others may refuse none."""

MOSTLY_SPLIT = ("BERT", "RoBERTa", "XLM-R", "MPNet", "DistilBERT", "DeBERTa", "ELECTRA", "T5", "ALBERT")
MIN_SPLIT = 0.8
"""Smallest accepted fraction of the parameters of these families that tensor parallelism splits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare families, print the outcomes, and return 1 if any of them is a defect."""
    parser = argparse.ArgumentParser("python -m tests.zoo", description=__doc__)
    parser.add_argument("--families", help="names of families, separated by commas (default: all)")
    parser.add_argument("--strategies", help="names of strategies, separated by commas (default: all)")
    parser.add_argument("--details", action="store_true", help="print the tracebacks of failures")
    parser.add_argument(
        "--write",
        type=Path,
        help="file whose generated section is replaced by the table of all results, these and earlier ones",
    )
    options = parser.parse_args(argv)
    families = {name: FAMILIES[name] for name in _chosen(parser, "--families", options.families, list(FAMILIES))}
    strategies = _chosen(parser, "--strategies", options.strategies, list(STRATEGIES))
    fork_server(*sorted({_module_of(family) for family in families.values()}))
    pool = WorkerPool()
    try:
        rows = {name: _compared(pool, family, strategies, options.details) for name, family in families.items()}
    finally:
        pool.close()
    print(summary(rows))
    if options.write:
        stored = Results.read()
        stored.update(rows)
        stored.write()
        stored = Results.read()  # The file rounds; the page must show what the file holds.
        write_section(options.write, markdown(stored.rows, FAMILIES, stored.versions))
    wrong = complaints(rows)
    print(*wrong, sep="\n")
    return int(bool(wrong))


def complaints(rows: Mapping[str, Row]) -> list[str]:
    """Return a line for each defect in the table: failures, too many refusals, and too few split parameters."""
    found = [
        f"{name} under {strategy}: {cell}"
        for name, row in rows.items()
        for strategy, cell in row.items()
        if cell.is_failure or (cell.status == "refused" and strategy not in MAX_REFUSED)
    ]
    found += [
        f"{name}: only {row['tensor_parallel'].split:.0%} of the parameters are split"
        for name, row in rows.items()
        if name in MOSTLY_SPLIT and "tensor_parallel" in row and row["tensor_parallel"].split < MIN_SPLIT
    ]
    for strategy, limit in MAX_REFUSED.items():
        refused = [name for name, row in rows.items() if strategy in row and row[strategy].status == "refused"]
        if len(refused) > limit:
            found.append(f"{strategy} refuses {len(refused)} families, more than {limit}: {', '.join(refused)}")
    return found


def _compared(pool: WorkerPool, family: Family, strategies: Sequence[str], prints_details: bool) -> Row:
    row: dict[str, Cell] = {}
    start = time.monotonic()
    expected = pool.run(run, 1, family.name, None)[0]
    for strategy in strategies:
        cell = row[strategy] = compare(pool, family, strategy, expected)
        split = f", {cell.split:.0%} split" if strategy == "tensor_parallel" and cell.split else ""
        error = f" ({cell.error:.0e}{split})" if cell.status == "equal" else ""
        print(f"{family.name:<20} {strategy:<18} {cell}{error}", flush=True)
        if prints_details and cell.details:
            print(cell.details, flush=True)
    print(f"{family.name:<20} took {time.monotonic() - start:.0f} s", flush=True)
    return row


def _chosen(parser: argparse.ArgumentParser, option: str, text: str | None, known: list[str]) -> list[str]:
    names = known if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            parser.error(f"{option}: {name!r} is not one of {', '.join(known)}")
    return names


def _module_of(family: Family) -> str:
    """Return the Python module of a family's model, which the fork server imports so that its workers need not."""
    return str(getattr(transformers, family.model).__module__)


if __name__ == "__main__":
    sys.exit(main())
