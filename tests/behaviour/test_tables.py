"""Check that the tables in the documentation are those of the stored results, and that these are not stale.

When one of these tests fails, run ``make behaviour``, or ``python -m tests.behaviour --cases <area> --write
docs/compatibility.md`` for the areas that the failure names.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from tests.behaviour.matrix import columns_in_turn, load_cases
from tests.behaviour.results import Results, digest_of
from tests.behaviour.subjects import NOT_TRIED, SUBJECTS
from tests.behaviour.table import BEGIN, END, tables

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

BASE_CLASSES = {"Callback", "Checkpoint", "Logger", "Optimizer", "ProgressBar"}

STATED_ELSEWHERE = {
    "callbacks",
    "default_root_dir",
    "devices",
    "logger",
    "num_nodes",
    "plugins",
    "strategy",
}
"""Arguments of the Trainer that every case sets, or that other tables and pages are about."""


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.read()


def test_the_page_shows_the_stored_results(results: Results) -> None:
    page = PAGE.read_text()
    written = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == tables(list(load_cases().values()), results.cells).strip()


def test_every_case_was_run_under_its_columns(results: Results) -> None:
    expected = columns_in_turn(load_cases().values())
    assert {
        name for name, columns in expected.items() if not set(columns) <= results.cells.get(name, {}).keys()
    } == set()
    assert results.cells.keys() - expected.keys() == set()


def test_no_case_was_changed_since_it_was_run(results: Results) -> None:
    areas = {case.area for case in load_cases().values()}
    assert {area for area in areas if results.digests.get(area) != digest_of(area)} == set()


def test_every_outcome_is_good(results: Results) -> None:
    assert [name for name, row in results.cells.items() if not all(cell.is_good for cell in row.values())] == []


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Callbacks", pl.callbacks.__all__),
        ("Loggers", pl.loggers.__all__),
        ("Trainer options", inspect.signature(pl.Trainer).parameters),
        (
            "Optimizers and schedulers",
            [name for name in torch.optim.__all__ if inspect.isclass(getattr(torch.optim, name))],
        ),
    ],
)
def test_the_table_names_everything_that_lightning_and_torch_have(kind: str, names: list[str]) -> None:
    shown = {subject.replace("`", "").split()[0] for subject in SUBJECTS[kind]}
    left_out = BASE_CLASSES | STATED_ELSEWHERE | NOT_TRIED.get(kind, {}).keys()
    assert set(names) - left_out - shown == set()
