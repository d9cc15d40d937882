"""Compare the predicted memory of each case with that of real ranks, and write the table into a page.

Run ``python -m tests.planning --write docs/planning.md``. It takes six minutes on two cores.
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

from tests.planning.growth import ENVIRONMENT, measure_growth

os.environ.update(ENVIRONMENT)

from lightning_dist.plugins.planning import DryRun, dry_run
from tests.planning.cases import CASES, Case, make
from tests.planning.measured import Measured, measure
from tests.pool import WorkerPool

_GROWTH_TOLERANCE = 0.05
"""The largest accepted error of the prediction of a process's growth, which has more in it than tensors."""

_BEGIN, _END = "<!-- begin of the table -->", "<!-- end of the table -->"


class Row(NamedTuple):
    """Hold what was predicted and measured for a rank of a case."""

    case: Case
    predicted: DryRun
    measured: Measured
    growth: int

    @property
    def error(self) -> float:
        """Return the relative error of the predicted peak."""
        return self.predicted.peak / self.measured.peak - 1

    @property
    def growth_error(self) -> float:
        """Return the relative error of the predicted peak as a prediction of the process's growth."""
        return self.predicted.peak / self.growth - 1

    @property
    def is_good(self) -> bool:
        """Return whether both errors are within their tolerances."""
        return abs(self.error) <= self.case.tolerance and abs(self.growth_error) <= _GROWTH_TOLERANCE

    def __str__(self) -> str:
        numbers = (self.predicted.resident, self.measured.resident, self.predicted.peak, self.measured.peak)
        cells = [str(self.case), str(self.predicted.rank), *(f"{number / 2**20:.2f}" for number in numbers)]
        return f"| {' | '.join(cells)} | {self.error:+.2%} | {self.growth / 2**20:.1f} | {self.growth_error:+.1%} |"


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
    worst = max(rows, key=lambda row: abs(row.growth_error))
    print(f"That of the process's growth is {worst.growth_error:+.1%}, of {worst.case} on rank {worst.predicted.rank}.")
    if options.write:
        text = options.write.read_text()
        begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
        titles = ("training", "rank", "resident, predicted", "measured", "peak, predicted", "measured", "error")
        header = f"| {' | '.join((*titles, 'process grew by', 'error'))} |\n{'|---' * 9}|\n"
        table = f"\n{header}" + "".join(f"{row}\n" for row in rows)
        options.write.write_text(text[:begin] + table + text[end:])
    return int(not all(row.is_good for row in rows))


def _rows() -> Iterator[Row]:
    pool = WorkerPool()
    try:
        for case in CASES:
            measured = pool.run(measure, case.num_ranks, case)
            growth = pool.run(measure_growth, case.num_ranks, case)
            for rank in case.ranks:
                predicted = dry_run(partial(make, case), 1, case.num_ranks, rank)
                yield Row(case, predicted, measured[rank], growth[rank])
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
