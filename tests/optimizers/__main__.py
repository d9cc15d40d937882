"""Train with the optimizers of torch and of packages under every strategy, and compare each with one process."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from lightning_dist.run.parity import errors
from tests.distributed.fit import Weights
from tests.optimizers.makers import PACKAGES, makers, versions
from tests.optimizers.run import STRATEGIES, WORLD_SIZES, train, train_all
from tests.optimizers.table import EQUAL, FAILS_ALONE, ROUNDING, Rows, markdown, read, store, summary, write_section
from tests.pool import RankFailed, WorkerPool

TOLERANCE = 1e-9
TIMED = (
    "here: BySomeRows",
    "here: Orthogonal",
    "here: Shampoo",
    "transformers: Adafactor, lr",
    "torch: Muon",
    "torch: AdamW",
)
"""The optimizers whose step times are compared."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare optimizers, print the outcomes, and return 1 if any of them is a defect."""
    parser = argparse.ArgumentParser("python -m tests.optimizers", description=__doc__)
    parser.add_argument("--packages", default=",".join(PACKAGES), help="packages, separated by commas (default: all)")
    parser.add_argument("--only", default="*", help="pattern of the names of optimizers, such as 'timm: *ada*'")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="separated by commas (default: all)")
    parser.add_argument("--details", action="store_true", help="print the tracebacks of failures")
    parser.add_argument("--no-times", action="store_true", help="do not compare times of steps")
    parser.add_argument("--write", type=Path, help="file whose generated section is replaced by the table of all")
    options = parser.parse_args(argv)
    names = [name for name in makers(options.packages.split(",")) if fnmatch(name, options.only)]
    pool = WorkerPool()
    try:
        rows = compare(pool, names, options.strategies.split(","), options.details)
        times = {} if options.no_times else {name: _ratio(pool, name) for name in TIMED if name in rows}
    finally:
        pool.close()
    print(summary(rows), *(f"{name}: {text}" for name, text in times.items()), sep="\n")
    store(versions(), rows, times)
    if options.write:
        write_section(options.write, markdown(read(), list(STRATEGIES), TOLERANCE))
    wrong = [
        f"{name} under {strategy}: {cell}"
        for name, row in rows.items()
        for strategy, cell in row.items()
        if not cell.startswith((EQUAL, FAILS_ALONE, ROUNDING))
    ]
    print(*wrong, sep="\n")
    return int(bool(wrong))


def compare(pool: WorkerPool, names: Sequence[str], strategies: Sequence[str], details: bool) -> Rows:
    """Return the outcome of each optimizer under each strategy."""
    rows: Rows = {}
    for name in names:
        start = time.perf_counter()
        try:
            expected = pool.run(train_all, 1, [name], "one process", timeout_s=300.0)[0][name]
        except RankFailed as error:
            expected = _last_line(error)
        rows[name] = {s: _cell(pool, name, s, expected, details) for s in strategies}
        print(f"{name}: {rows[name]} in {time.perf_counter() - start:.1f} s", flush=True)
    return rows


def _cell(pool: WorkerPool, name: str, strategy: str, expected: Weights | str, details: bool) -> str:
    if isinstance(expected, str):
        return f"{FAILS_ALONE}: {_shortened(expected)}"
    if not all(np.isfinite(weight).all() for weight in expected.values()):
        return f"{FAILS_ALONE}: its weights are not finite"
    try:
        found = pool.run(train, WORLD_SIZES[strategy], name, strategy, timeout_s=240.0, grace_s=30.0)
    except RankFailed as error:
        if details:
            print(error)
        text = _last_line(error)
        return f"{'refused' if 'MisconfigurationException' in text else 'CRASHED'}: {_shortened(text)}"
    largest = max(errors(_tensors(found[0][0]), _tensors(expected)).values())
    if largest <= TOLERANCE:
        return EQUAL
    in_other_order = pool.run(train, 1, name, "one process", reverses=True, timeout_s=300.0)[0][0]
    alone = max(errors(_tensors(in_other_order), _tensors(expected)).values())
    if alone > TOLERANCE and largest <= 10 * alone:
        return f"{ROUNDING}: off by {largest:.0e}, and by {alone:.0e} in one process with another order of samples"
    return f"WRONG: off by {largest:.1e}"


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(weight) for name, weight in weights.items()}


def _last_line(error: RankFailed) -> str:
    lines = [text.strip().splitlines()[-1] for _, text in sorted(error.errors.items())]
    return next((line for line in lines if "OtherRankError" not in line), lines[0])


def _shortened(text: str) -> str:
    return text.strip().splitlines()[0].replace("|", "/")[:200]


def _ratio(pool: WorkerPool, name: str) -> str:
    """Return the median step time under full_shard divided by that under data_parallel, each measured three times."""
    medians: dict[str, list[float]] = {"full_shard": [], "data_parallel": []}
    for turn in range(3):
        for strategy in sorted(medians, reverse=turn % 2 == 1):
            times = pool.run(train, 2, name, strategy, 128, 20, timeout_s=300.0)
            medians[strategy].append(float(np.median(times[0][1])))
    ratios = [one / other for one, other in zip(*medians.values(), strict=True)]
    low, high = 1e3 * min(medians["full_shard"]), 1e3 * min(medians["data_parallel"])
    return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {low:.0f} / {high:.0f} ms)"


if __name__ == "__main__":
    sys.exit(main())
