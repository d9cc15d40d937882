"""Store the outcomes of all families, from which the table of the documentation is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests.zoo.compare import Cell
from tests.zoo.families import FAMILIES
from tests.zoo.run import STRATEGIES
from tests.zoo.table import Row

__all__ = ["RESULTS", "Results", "current_versions"]

RESULTS = Path(__file__).parent / "results.json"


def current_versions() -> str:
    """Return the versions of the libraries with which the families are compared, as text."""
    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


@dataclass
class Results:
    """Hold the outcomes of families.

    Args:
        rows: The cells of each family under each strategy.
        versions: The versions of the libraries that the last comparison ran with, as text.
    """

    rows: dict[str, Row]
    versions: str

    @classmethod
    def read(cls, path: Path = RESULTS) -> Results:
        """Return the results that are stored at ``path``; there are none if the file does not exist."""
        stored = json.loads(path.read_text()) if path.exists() else {"versions": "", "rows": {}}
        rows = {
            name: {strategy: Cell(status, text, split=split) for strategy, (status, text, split) in row.items()}
            for name, row in stored["rows"].items()
        }
        return cls(rows, stored["versions"])

    def update(self, rows: Mapping[str, Row]) -> None:
        """Take over the cells of ``rows``, and drop those of other versions and of families that are no more."""
        if self.versions != current_versions():
            self.rows = {}
        merged = {name: {**self.rows.get(name, {}), **rows.get(name, {})} for name in FAMILIES}
        self.rows = {
            name: {strategy: row[strategy] for strategy in STRATEGIES if strategy in row}
            for name, row in merged.items()
            if row
        }
        self.versions = current_versions()

    def write(self, path: Path = RESULTS) -> None:
        """Store the results at ``path``, with a line for each family, so that changes can be read in a diff."""
        lines = [
            f"  {json.dumps(name)}: "
            + json.dumps({strategy: [cell.status, cell.text, round(cell.split, 4)] for strategy, cell in row.items()})
            for name, row in self.rows.items()
        ]
        path.write_text(f'{{"versions": {json.dumps(self.versions)},\n"rows": {{\n' + ",\n".join(lines) + "\n}}\n")
