"""Run cases under strategies, print every defect, and write the table (``python -m tests.behaviour``)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.behaviour.case import LAYOUTS, TECHNIQUES, Case
from tests.behaviour.matrix import ALL, Cell, Matrix, columns_in_turn, load_cases
from tests.behaviour.results import Results
from tests.behaviour.table import tables, write_tables
from tests.pool import WorkerPool, fork_server


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run ordinary Lightning code under every strategy, and compare it with one process."
    )
    parser.add_argument("--cases", default="*", help="patterns of names or areas of cases, separated by commas")
    parser.add_argument(
        "--strategies",
        help=f"strategies and techniques, separated by commas: {', '.join(LAYOUTS)}; 'one' runs only the references,"
        f" 'techniques' only the techniques of the default. By default, {', '.join(ALL)}, of which the cases of some"
        " areas run only one or two, in turn, and some of the techniques, in turn",
    )
    parser.add_argument("--all", action="store_true", help="run every case under every strategy and technique")
    parser.add_argument("--missing", action="store_true", help="run what is not among the stored results")
    parser.add_argument("--jobs", type=int, default=2, help="number of cases that run at the same time")
    parser.add_argument(
        "--write",
        type=Path,
        help="file whose generated section is replaced by the tables of all results, these and earlier ones",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and run nothing")
    options = parser.parse_args()
    patterns = options.cases.split(",")
    chosen = [
        case
        for name, case in load_cases().items()
        if any(fnmatch(part, pattern) for pattern in patterns for part in (name, case.area, name.partition(".")[2]))
    ]
    if options.list:
        print("\n".join(f"{case.name:<60} {case.title}" for case in chosen))
        return 0
    columns = columns_in_turn(load_cases().values())
    if options.all:
        columns = {case.name: tuple(case.columns) or (*ALL, *TECHNIQUES) for case in chosen}
    elif options.strategies == "techniques":
        columns = {case.name: tuple(key for key in columns[case.name] if key in TECHNIQUES) for case in chosen}
    elif options.strategies is not None:
        columns = {case.name: tuple(options.strategies.split(",")) for case in chosen}
    if options.missing:
        known = Results.read().cells
        columns = {name: tuple(c for c in row if c not in known.get(name, {})) for name, row in columns.items()}
        chosen = [case for case in chosen if columns[case.name]]
    fork_server("tests.behaviour.preload")
    start = time.monotonic()
    pools = [WorkerPool() for _ in range(options.jobs)]
    free = list(pools)

    def run(case: Case) -> tuple[dict[str, Cell], float]:
        pool = free.pop()
        begin = time.monotonic()
        try:
            matrix = Matrix(pool)
            return {column: matrix.cell(case, column) for column in columns[case.name]}, time.monotonic() - begin
        finally:
            free.append(pool)

    results: dict[str, dict[str, Cell]] = {}
    with ThreadPoolExecutor(options.jobs) as threads:
        for case, (row, seconds) in zip(chosen, threads.map(run, chosen), strict=True):
            results[case.name] = row
            outcomes = "  ".join(f"{column} {cell.outcome}" for column, cell in row.items())
            print(f"{case.name}: {outcomes} ({seconds:.1f} s)", flush=True)
            for column, cell in row.items():
                if not cell.is_good:
                    print(f"  {column}: {cell.outcome.upper()}: {cell.text}".replace("\n", "\n    "), flush=True)
    for pool in pools:
        pool.close()
    all_cells = [cell for row in results.values() for cell in row.values()]
    bad = sum(not cell.is_good for cell in all_cells)
    counts = {outcome: sum(cell.outcome == outcome for cell in all_cells) for outcome in {c.outcome for c in all_cells}}
    print(f"{len(results)} cases, {len(all_cells)} cells in {time.monotonic() - start:.0f} s: {counts}")
    if options.write:
        stored = Results.read()
        stored.update(results, load_cases())
        stored.write()
        write_tables(
            options.write, tables([case for name, case in load_cases().items() if name in stored.cells], stored.cells)
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
