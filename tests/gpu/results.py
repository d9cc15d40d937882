"""Keep what checks have found in a file, which is written after each of them."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.gpu.check import Check
from tests.gpu.machine import Machine

__all__ = ["DONE", "FAILED", "Results"]

DONE = ("passed", "not met", "failed", "out of time")
"""States of checks that have come to an end, and are not repeated unless this is asked for."""

FAILED = ("not met", "failed", "out of time", "interrupted")


class Results:
    """Hold the results of a machine by the names of checks.

    A check whose process ended while it ran has the state ``interrupted``, and runs again.

    Args:
        folder: Folder of the files.
        machine: The machine, whose newest file is continued.
        begins: Whether to begin a new file all the same.
    """

    def __init__(self, folder: Path, machine: Machine, begins: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-")
        older = sorted(path for path in folder.glob(f"*-{slug}.json") if _is_date(path.name[:10]))
        today = f"{datetime.now():%Y-%m-%d}"
        self.path = folder / f"{today}-{slug}.json" if begins or not older else older[-1]
        self.content: dict[str, Any] = {"begun": f"{datetime.now():%Y-%m-%d %H:%M}", "seconds": 0.0, "checks": {}}
        if self.path.exists() and not begins:
            self.content = json.loads(self.path.read_text())
        self.content["machine"] = machine.as_json()
        for row in self.checks.values():
            if row["state"] == "running":
                row["state"] = "interrupted"
                row["error"] = "The process that ran this check ended."

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        """Return the results by name."""
        return self.content["checks"]

    @property
    def page(self) -> Path:
        """Return the path of the page."""
        return self.path.with_suffix(".md")

    def is_due(self, check: Check, again: str | None) -> bool:
        """Return whether a check has to run.

        Args:
            check: The check.
            again: What to repeat, and nothing else: a pattern of names, ``"failed"`` or ``"all"``. None: what has not
                come to an end.
        """
        state = self.checks.get(check.name, {}).get("state")
        if again is None:
            return state not in DONE
        return state in FAILED if again == "failed" else again == "all" or fnmatchcase(check.name, again)

    def record(self, check: Check, state: str, **values: Any) -> None:
        """Set the result of a check, and write the file."""
        self.checks[check.name] = {"section": check.section, "state": state, **values}
        if state in DONE:
            self.content["seconds"] += values.get("seconds", 0.0)
        self.save()

    def save(self) -> None:
        """Write the file at once or not at all."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(part, self.path)


def _is_date(text: str) -> bool:
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text) is not None
