"""Compare time, memory, traffic and checkpoints with those of other ways to train the same model."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

# Each rank has one core. torch reads this variable when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import lightning
import torch

from tests.bench.cases import CASES, NotMeasuredError, Result, Settings, measure
from tests.pool import RankFailed

COLUMNS = "{:<42} {:>10} {:>10} {:>4} {:>9} {:>18} {:>5} {:>12}  {}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen cases, print a row for each, and return 1 if a bound is missed or a case failed, else 0."""
    options = _parse(argv)
    settings = Settings.quick() if options.quick else Settings.full(options.minutes)
    cases = [case for case in CASES if any(fnmatchcase(case.name, pattern) for pattern in options.case)]
    if options.quick:
        cases = [replace(case, bound=None, at_least=None) for case in cases]
    machine = _machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"step and startup: {settings.model}\nlarge_step and memory: {settings.large_model}\n")
    print(COLUMNS.format("case", "ours", "theirs", "", "ratio", "95% interval", "pairs", "bound", ""), flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases:
        row: dict[str, Any] = {"name": case.name, "bound": case.bound, "at_least": case.at_least, "unit": case.unit}
        try:
            result = measure(case, settings)
        except NotMeasuredError as error:
            row["verdict"] = "not measured"
            print(f"{case.name:<42} not measured: {error}", flush=True)
        except RankFailed as error:
            row["verdict"] = "FAILED"
            print(f"{case.name:<42} FAILED\n{error}", flush=True)
        else:
            row |= _as_row(result)
            print(_as_text(result), flush=True)
        rows.append(row)
    if options.json:
        content = {"machine": machine, "settings": asdict(settings), "cases": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(row["verdict"] in ("NOT MET", "TOO WIDE", "FAILED") for row in rows))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.bench", description=__doc__)
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="name or pattern of cases; may be repeated (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="measure a few pairs on a tiny model; checks no bound")
    parser.add_argument("--minutes", type=float, default=5.0, help="longest time to measure a case (default: 5)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures to this file")
    options = parser.parse_args(argv)
    options.case = options.case or ["*"]
    for pattern in options.case:
        if not any(fnmatchcase(case.name, pattern) for case in CASES):
            parser.error(f"--case {pattern}: no such case; there are\n  " + "\n  ".join(case.name for case in CASES))
    return options


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        model = next((line.partition(": ")[2] for line in info.read_text().splitlines() if "model name" in line), model)
    return {
        "CPU": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def _as_row(result: Result) -> dict[str, Any]:
    return {
        "ours": result.pairs.ours,
        "theirs": result.pairs.theirs,
        "median": result.pairs.median,
        "interval": result.pairs.interval,
        "verdict": result.verdict,
        "note": result.note,
    }


def _as_text(result: Result) -> str:
    case, pairs = result.case, result.pairs
    sign = "+" if case.kind == "startup" else ""
    ours, theirs = (f"{median(side):.1f}" for side in (pairs.ours, pairs.theirs))
    interval = " to ".join(f"{end:{sign}.3f}" for end in pairs.interval) if pairs.interval else "-"
    bound = "-" if case.bound is None else f"<= {case.bound}"
    if case.at_least is not None:
        bound = f"{case.at_least} to {case.bound}"
    return COLUMNS.format(
        case.name,
        ours,
        theirs,
        case.unit,
        f"{pairs.median:{sign}.3f}",
        interval,
        len(pairs),
        bound,
        f"{result.verdict}{'; ' if result.note else ''}{result.note}",
    )


if __name__ == "__main__":
    sys.exit(main())
