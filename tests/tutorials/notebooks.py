"""Execute the notebooks of the examples."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

from tests.tutorials.shell import NUM_LAST_LINES, Failure

__all__ = ["MISSING", "missing_packages", "run_notebook", "with_checked_commands"]

_SHELL = re.compile(r"^(!(?:.*\\\n)*.*)$", re.MULTILINE)
"""A command behind an exclamation mark, with the lines by which it is continued."""

MISSING = "Notebooks need {}: make docs-run installs what the tutorials need, or pip install nbclient ipykernel."


def missing_packages() -> list[str]:
    """Return the names of the packages that executing a notebook needs and that are not installed."""
    return [name for name in ("nbclient", "ipykernel") if importlib.util.find_spec(name) is None]


def with_checked_commands(source: str) -> str:
    """Return the source of a cell in which a command behind an exclamation mark raises if its exit code is not 0."""
    return _SHELL.sub(r"\1\nassert not _exit_code, f'exit code {_exit_code}'", source)


def run_notebook(
    path: Path,
    name: str,
    folder: Path,
    environment: dict[str, str],
    limit_s: float,
    log: TextIO,
    report: Callable[[str], None] = print,
) -> Failure | None:
    """Execute the cells of a notebook in their order, until one of them fails.

    Args:
        path: Path of the notebook, which is not changed.
        name: Path of the notebook in the repository, for the report.
        folder: Working directory of the cells.
        environment: All environment variables of the kernel.
        limit_s: Seconds that a cell may take.
        log: File that gets the source and the output of each cell.
        report: Function that is given a line on each cell when it begins and when it has ended.

    Returns:
        The cell that failed, or None.
    """
    if missing := missing_packages():
        return Failure(name, "nbclient", MISSING.format(" and ".join(missing)), "")
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=int(limit_s), resources={"metadata": {"path": str(folder)}})
    with patch.dict(os.environ, environment, clear=True), client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            cell.source = with_checked_commands(cell.source)
            report(f"{name}, cell {index}: {cell.source.splitlines()[0] if cell.source else ''}")
            began = time.monotonic()
            error = ""
            try:
                client.execute_cell(cell, index)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as raised:
                error = type(raised).__name__
            output = _text(cell.outputs)
            log.write(f"{cell.source}\n{output}\n")
            report(f"  {time.monotonic() - began:6.1f} s  {error or 'done'}")
            if error:
                last = "\n".join(output.rstrip().splitlines()[-NUM_LAST_LINES:])
                return Failure(f"{name}, cell {index}", cell.source, error, last)
    return None


def _text(outputs: list[dict]) -> str:
    """Return what the outputs of a cell show as text."""
    parts = []
    for output in outputs:
        parts += [output.get("text", ""), *output.get("traceback", []), output.get("data", {}).get("text/plain", "")]
    return "".join(parts)
