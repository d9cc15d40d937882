"""Store the outcomes of all cells, from which the tables of the documentation are made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.behaviour import cases as case_modules
from tests.behaviour.matrix import Cell

__all__ = ["RESULTS", "Results", "digest_of"]

RESULTS = Path(__file__).parent / "results.json"

Rows = dict[str, dict[str, Cell]]


def digest_of(area: str) -> str:
    """Return a digest of the file that the cases of ``area`` are in."""
    return hashlib.sha256((Path(case_modules.__path__[0]) / f"{area}.py").read_bytes()).hexdigest()[:16]


@dataclass
class Results:
    """Hold the outcomes of cells.

    Args:
        cells: The cells by the name of the case and then by the column.
        digests: For each area, :func:`digest_of` its file when its cases ran.
    """

    cells: Rows
    digests: dict[str, str]

    @classmethod
    def read(cls, path: Path = RESULTS) -> Results:
        """Return the results that are stored at ``path``; there are none if the file does not exist."""
        stored = json.loads(path.read_text()) if path.exists() else {"digests": {}, "cells": {}}
        cells = {
            name: {column: Cell(outcome, text) for column, (outcome, text) in row.items()}
            for name, row in stored["cells"].items()
        }
        return cls(cells, stored["digests"])

    def update(self, rows: Mapping[str, Mapping[str, Cell]], names: Iterable[str]) -> None:
        """Take over the cells that have been run, and drop those of cases that do not exist any more.

        Args:
            rows: The cells that have been run.
            names: The names of all cases.
        """
        names = list(names)
        for name, row in rows.items():
            self.cells[name] = {**self.cells.get(name, {}), **row}
        self.cells = {name: self.cells[name] for name in names if name in self.cells}
        areas = {name.partition(".")[0] for name in names}
        for area in areas:  # The file of an area counts as run when all of its cases have been run.
            of_area = {name for name in names if name.startswith(f"{area}.")}
            if of_area <= rows.keys():
                self.digests[area] = digest_of(area)
        self.digests = {area: digest for area, digest in sorted(self.digests.items()) if area in areas}

    def write(self, path: Path = RESULTS) -> None:
        """Store the results at ``path``, with a line for each case, so that changes can be read in a diff."""
        lines = [
            f"  {json.dumps(name)}: " + json.dumps({column: [cell.outcome, cell.text] for column, cell in row.items()})
            for name, row in self.cells.items()
        ]
        path.write_text(
            f'{{"digests": {json.dumps(self.digests, indent=1)},\n"cells": {{\n' + ",\n".join(lines) + "\n}}\n"
        )
