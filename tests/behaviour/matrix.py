"""Run cases on real processes, and compare the values that they record with those of the reference."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from tests.behaviour import cases as case_modules
from tests.behaviour.case import CASES, LAYOUTS, REFERENCES, TECHNIQUES, Case, Layout, Run, is_raised_by_project, quiet
from tests.behaviour.models import variant
from tests.behaviour.subjects import shown_cases
from tests.pool import RankFailed, WorkerPool

__all__ = ["ALL", "Cell", "Matrix", "columns_in_turn", "load_cases"]

OK = ("equal", "refused", "differs", "absent")

ALL = ("full", "hybrid", "tp", "pp", "nd", "data")
"""The columns of the table of strategies."""


@dataclass(frozen=True)
class Cell:
    """Describe the outcome of a case under a strategy.

    Args:
        outcome: ``equal``, ``refused``, ``differs``, ``wrong``, ``crashed``, ``hung``, or ``absent`` if the case has no
            block that shows the technique.
        text: Message of the refusal, sentence about the difference, or description of the defect; empty for ``equal``.
    """

    outcome: str
    text: str = ""

    @property
    def is_good(self) -> bool:
        return self.outcome in OK


IN_ALL_COLUMNS = frozenset(
    {
        "basics",
        "buffers_and_precision",
        "changes_while_saving",
        "checkpoints",
        "freezing",
        "gradient_reduction",
        "gradients_in_hooks",
        "hooks",
        "layers_and_backwards",
        "metrics",
        "random_numbers_in_hooks",
        "restoring",
        "resume",
        "resumed_states",
        "split_code",
        "states_in_hooks",
        "uneven_ranks",
        "unusual_steps",
        "weights_in_hooks",
        "whole_weights",
    }
)
"""Areas whose cases always run under every strategy, because their code paths depend most on the strategy."""

_TURNS: tuple[tuple[str, ...], ...] = (
    ("full", "pp"),
    ("tp",),
    ("hybrid",),
    ("nd", "data"),
    ("full", "pp"),
    ("tp", "nd"),
)
"""Columns under which the other cases run, unless they show a subject (see ``subjects.py``), which all columns need.

Each case of an area takes the next entry, and starts over at the end. An area begins at an entry of its own, so that
a new area changes nothing for the others.
"""


_ON_ANY_MODEL = tuple(column for column, layout in TECHNIQUES.items() if not layout.variant)
_ON_VARIANTS = tuple(column for column, layout in TECHNIQUES.items() if layout.variant)

IN_ALL_TECHNIQUES = frozenset({"split_code", "blocks_by_method"})
"""Areas whose cases run beside every technique; the others run beside two, in turn."""


def columns_in_turn(cases: Iterable[Case]) -> dict[str, tuple[str, ...]]:
    """Return the columns that each case runs under, chosen so that all cases take at most an hour on two cores."""
    cases = list(cases)
    shown = set(shown_cases(case.name for case in cases))
    turns: dict[str, Iterator[int]] = {}
    columns: dict[str, tuple[str, ...]] = {}
    for case in cases:
        turn = next(turns.setdefault(case.area, count(crc32(case.area.encode()))))
        if case.columns:
            columns[case.name] = tuple(case.columns)
            continue
        everywhere = case.area in IN_ALL_COLUMNS or case.name in shown
        strategies = ALL if everywhere else _TURNS[turn % len(_TURNS)]
        techniques = tuple(TECHNIQUES) if case.area in IN_ALL_TECHNIQUES else _techniques_in_turn(turn)
        columns[case.name] = (*strategies, *techniques)
    return columns


def _techniques_in_turn(turn: int) -> tuple[str, ...]:
    return tuple(columns[turn % len(columns)] for columns in (_ON_ANY_MODEL, _ON_VARIANTS))


def load_cases() -> dict[str, Case]:
    """Import all case modules, and return the cases by name."""
    for module in pkgutil.iter_modules(case_modules.__path__):
        importlib.import_module(f"{case_modules.__name__}.{module.name}")
    return CASES


@dataclass
class Observed:
    """Hold the values that a rank recorded, and its error if it failed."""

    values: dict[str, Any]
    own: dict[str, Any]
    error: str = ""
    trace: str = ""
    raised_by_project: bool = False
    has_variant: bool = False
    inexact: str = ""


def run_on_rank(name: str, column: str, folder: str, variant_name: str = "") -> Observed:
    """Run the case called ``name`` on this rank, with the given variant of its models' blocks."""
    import torch

    quiet()
    run = Run(load_cases()[name], column, Path(folder))
    torch.manual_seed(0)
    observed = Observed(run.observed, run.own)
    with variant(variant_name) as chosen:
        try:
            run.case.function(run)
        except Exception as error:
            observed.error, observed.trace = f"{type(error).__name__}: {error}", traceback.format_exc()
            observed.raised_by_project = is_raised_by_project(error)
        observed.has_variant, observed.inexact = chosen.used, run.inexact
    return observed


class Matrix:
    """Run cases under strategies, and run each reference only once for all strategies that are compared with it."""

    def __init__(self, pool: WorkerPool, reference_pool: WorkerPool | None = None) -> None:
        self._pool = pool
        self._reference_pool = reference_pool or pool
        self._references: dict[tuple[str, str, str], list[Observed] | Cell] = {}

    def cell(self, case: Case, column: str) -> Cell:
        """Run ``case`` under ``column``, and compare it with its reference."""
        layout = LAYOUTS[column]
        key = (case.name, case.reference_for(column), layout.variant)
        if key not in self._references:
            self._references[key] = self._run(self._reference_pool, case, key[1], REFERENCES[key[1]], layout.variant)
        expected = self._references[key]
        if layout.variant and (isinstance(expected, Cell) or expected[0].error or not expected[0].has_variant):
            return Cell("absent")  # Its own models have no such blocks, or none whose inputs are sequences.
        if isinstance(expected, Cell):
            return Cell(expected.outcome, f"the reference itself: {expected.text}")
        if expected[0].error:
            return Cell("crashed", f"the reference itself: {expected[0].trace}")
        if column in REFERENCES:
            return Cell("equal")
        found = self._run(self._pool, case, column, layout, layout.variant)
        if isinstance(found, Cell):
            return found
        return _judge_technique(case, column, found, expected) if layout.like else _judge(case, column, found, expected)

    def _run(
        self, pool: WorkerPool, case: Case, column: str, layout: Layout, variant_name: str
    ) -> list[Observed] | Cell:
        folder = tempfile.mkdtemp(prefix="behaviour-")
        arguments = (case.name, column, folder, variant_name)
        try:
            return pool.run(run_on_rank, layout.world_size, *arguments, timeout_s=case.timeout_s, grace_s=20.0)
        except RankFailed as failed:
            texts = " | ".join(f"rank {rank}: {text.strip()[-3000:]}" for rank, text in sorted(failed.errors.items()))
            return Cell("hung" if "hung for" in texts or "still running" in texts else "crashed", texts)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _judge(case: Case, column: str, found: list[Observed], expected: list[Observed]) -> Cell:
    refused = case.entry_for(column, case.refused)
    errors = [observed.error for observed in found]
    if refused is not None:
        if _matches(refused, errors):
            return Cell("refused", _sentence(errors[0]))
        return Cell("wrong", f"expected to be refused on every rank by {refused!r}, but: {errors}")
    if any(errors):
        return _crash(found)
    differs = case.entry_for(column, case.differs)
    return Cell("differs", differs) if differs is not None else _compared(case, column, found, expected)


def _judge_technique(case: Case, column: str, found: list[Observed], expected: list[Observed]) -> Cell:
    refused = case.entry_for(column, case.refused)
    differs = case.entry_for(column, case.differs) or found[0].inexact or None
    errors = [observed.error for observed in found]
    if any(errors):
        of_project = any(o.raised_by_project for o in found)
        if all(errors) and (of_project or (refused is not None and _matches(refused, errors))):
            return Cell("refused", _sentence(next((o.error for o in found if o.raised_by_project), errors[0])))
        return _crash(found)
    cell = _compared(case, column, found, expected)
    return Cell("differs", differs) if differs is not None and not cell.is_good else cell


def _matches(pattern: str, errors: Iterable[str]) -> bool:
    return all(error and re.search(pattern, error, re.DOTALL) for error in errors)


def _crash(found: list[Observed]) -> Cell:
    errors = [observed.error for observed in found]
    if not all(errors):
        return Cell("crashed", f"on some ranks only: {errors}\n" + _end(next(o.trace for o in found if o.error)))
    return Cell("crashed", _end(next(o.trace for o in found)))


def _compared(case: Case, column: str, found: list[Observed], expected: list[Observed]) -> Cell:
    tolerance = max(case.tolerance, LAYOUTS[column].tolerance)
    problems: list[str] = []
    for rank, observed in enumerate(found):
        values = observed.values
        if rank and case.reference == "ddp":  # ddp broadcasts buffers only before a forward, so they differ at the end.
            values = {key: expected[0].values[key] if key.endswith(": buffers") else v for key, v in values.items()}
        for problem in compare(values, expected[0].values, tolerance, case.leave_out):
            problems.append(f"rank {rank}: {problem}")
        if problems:
            break
    problems += compare(
        _joined(column, found), _joined(case.reference_for(column), expected), tolerance, case.leave_out
    )
    return Cell("wrong", "\n".join(problems[:6])) if problems else Cell("equal")


def _end(trace: str, num_lines: int = 12) -> str:
    """Return the last lines of a traceback, without the markers below the source code."""
    lines = [line for line in trace.rstrip().splitlines() if line.strip(" ^~")]
    return "\n".join(lines[-num_lines:])


def _sentence(error: str) -> str:
    """Return the message of an error on one line, without the name of its class and the folder of this repository."""
    return " ".join(error.partition(": ")[2].split()).replace(f"{Path(__file__).parents[2]}/", "")


def _joined(column: str, ranks: list[Observed]) -> dict[str, Any]:
    """Join the values that the ranks recorded for their parts of the batch, in the order of the samples.

    Histories of loggers are not joined; that of rank 0 is taken.
    """
    layout = LAYOUTS[column]
    parts = ranks[:: layout.neighbours][: layout.num_data_parallel]
    joined: dict[str, Any] = {}
    for name, value in ranks[0].own.items():
        if name.endswith(": history") or not isinstance(value, np.ndarray):
            joined[name] = value
        else:  # Sample k of part p is sample k * num_parts + p of the dataset.
            stacked = np.stack([part.own[name] for part in parts], axis=1)
            joined[name] = stacked.reshape(-1, *stacked.shape[2:])
    return joined


def compare(
    found: Any, expected: Any, tolerance: float, leave_out: Any = (), path: str = "", scale: float = 0.0
) -> list[str]:
    """Return the differences between two recorded values, one line each.

    Args:
        found: Value that a rank recorded.
        expected: Value that the reference recorded.
        tolerance: Largest accepted norm of a difference, relative to the norm of the expected value.
        leave_out: Keys that are not compared.
        path: Position of the values in the recorded values, for the lines that are returned.
        scale: Norm of all tensors in the same dictionary; a tensor whose norm is below a millionth of it is compared
            relative to that millionth instead of its own norm.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        problems = []
        if found.keys() != expected.keys():
            problems.append(
                f"{path}: only here {sorted(found.keys() - expected.keys())}, only in the reference"
                f" {sorted(expected.keys() - found.keys())}"
            )
        arrays = [v for v in expected.values() if isinstance(v, np.ndarray) and v.dtype.kind == "f"]
        total = math.sqrt(sum(float(np.linalg.norm(v.astype(np.float64))) ** 2 for v in arrays))
        for key in expected.keys() & found.keys():
            if key not in leave_out:
                problems += compare(found[key], expected[key], tolerance, leave_out, f"{path}/{key}", total)
        return sorted(problems)
    if isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return [f"{path}: {len(found)} items where the reference has {len(expected)}: {found} / {expected}"[:600]]
        return [
            problem
            for i, (f, e) in enumerate(zip(found, expected, strict=True))
            for problem in compare(f, e, tolerance, leave_out, f"{path}[{i}]", scale)
        ]
    is_number = isinstance(expected, int | float | np.ndarray) and not isinstance(expected, bool)
    if is_number and isinstance(found, int | float | np.ndarray) and not isinstance(found, bool):
        f, e = np.asarray(found), np.asarray(expected)
        if f.shape != e.shape:
            return [f"{path}: shape {f.shape}, expected {e.shape}"]
        if np.array_equal(f, e, equal_nan=f.dtype.kind == "f" and e.dtype.kind == "f"):
            return []
        f, e = f.astype(np.float64), e.astype(np.float64)
        error = float(np.linalg.norm(f - e)) / max(float(np.linalg.norm(e)), 1e-6 * scale, 1e-300)
        if not error <= tolerance:
            shown = f"{f} / {e}" if e.size <= 4 else ""
            return [f"{path}: off by {error:.2e} {shown}"]
        return []
    return [] if found == expected else [f"{path}: {found!r} where the reference has {expected!r}"[:600]]
