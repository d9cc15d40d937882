"""A part of the matrix that covers every area under every strategy; ``make behaviour`` runs all of it."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.behaviour.case import STRATEGIES, Case
from tests.behaviour.matrix import Matrix, load_cases
from tests.behaviour.open_defects import OPEN_DEFECTS
from tests.pool import WorkerPool

PER_AREA = 3
"""Cells of each area, at most, so that all of them together take two minutes on two cores."""


def covering() -> list[tuple[str, str]]:
    """Choose cells, evenly spread over the cases of each area, the columns in turn."""
    by_area: dict[str, list[str]] = defaultdict(list)
    for name, case in load_cases().items():
        by_area[case.area].append(name)
    chosen, columns = [], list(STRATEGIES)
    for names in by_area.values():
        step = max(len(names) // PER_AREA, 1)
        for name in names[::step][:PER_AREA]:
            cell = (name, columns[len(chosen) % len(columns)])
            chosen.append(cell)
    return [cell for cell in chosen if cell not in OPEN_DEFECTS]


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, reference_pool: WorkerPool) -> Matrix:
    return Matrix(pool, reference_pool)


@pytest.mark.parametrize(("name", "column"), covering())
def test_cell(matrix: Matrix, name: str, column: str) -> None:
    case: Case = load_cases()[name]
    cell = matrix.cell(case, column)
    assert cell.is_good, f"{cell.outcome}: {cell.text}"
