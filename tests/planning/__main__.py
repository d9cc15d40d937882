"""Compare the predicted memory of each case with that of real ranks, and write the table into a page.

Run ``python -m tests.planning --write docs/planning.md``. It takes four minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

from lightning_dist.plugins.planning import DryRun, dry_run
from tests.planning.cases import CASES, Case, make
from tests.planning.measured import Measured, measure
from tests.pool import WorkerPool

_BEGIN, _END = "<!-- begin of the table -->", "<!-- end of the table -->"


class Row(NamedTuple):
    """Hold what was predicted and measured for a rank of a case."""

    case: Case
    predicted: DryRun
    measured: Measured

    @property
    def error(self) -> float:
        """Return the relative error of the predicted peak."""
        return self.predicted.peak / self.measured.peak - 1

    def __str__(self) -> str:
        numbers = (self.predicted.resident, self.measured.resident, self.predicted.peak, self.measured.peak)
        cells = [str(self.case), str(self.predicted.rank), *(f"{number / 2**20:.2f}" for number in numbers)]
        return f"| {' | '.join(cells)} | {self.error:+.2%} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all cases, print their rows, and return 1 if a prediction is off by more than its tolerance."""
    parser = argparse.ArgumentParser("python -m tests.planning", description=__doc__)
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args(argv)
    rows = []
    for row in _rows():
        rows.append(row)
        print(row, flush=True)
    worst = max(rows, key=lambda row: abs(row.error))
    print(f"The largest error is {worst.error:+.2%}, of {worst.case} on rank {worst.predicted.rank}.")
    if options.write:
        text = options.write.read_text()
        begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
        header = "| training | rank | resident, predicted | measured | peak, predicted | measured | error |\n"
        table = f"\n{header}|---|---|---|---|---|---|---|\n" + "".join(f"{row}\n" for row in rows)
        options.write.write_text(text[:begin] + table + text[end:])
    return int(any(abs(row.error) > row.case.tolerance for row in rows))


def _rows() -> Iterator[Row]:
    pool = WorkerPool()
    try:
        for case in CASES:
            measured = pool.run(measure, case.num_ranks, case)
            for rank in case.ranks:
                yield Row(case, dry_run(partial(make, case), 1, case.num_ranks, rank), measured[rank])
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
