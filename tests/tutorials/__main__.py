"""Run the bash blocks of the tutorials, and the notebooks, in temporary copies of the examples.

Each page has a copy of its own, and its commands run in one shell, one after the other. The exit code is 1 if a command
failed, and the page, the line, the command and the end of its output are printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.tutorials.blocks import commands
from tests.tutorials.notebooks import run_notebook
from tests.tutorials.shell import Failure, run_commands

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/tutorials"
NOTEBOOKS = ROOT / "examples/notebooks"
TORCHVISION = Path(__file__).parent / "torchvision_without_operators"
"""Folder that is put in front of the path of modules for pages that need torchvision, if it exists."""

_USES_TORCHVISION = ("torchvision", "timm", "diffusers", "peft")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "mlruns", "mlartifacts", "mlflow.db*", "checkpoints", "*.ckpt")


def tutorials() -> dict[str, Path]:
    """Return the paths of the pages and the notebooks by their names."""
    pages = {path.stem: path for path in sorted(PAGES.glob("*.md")) if path.stem != "index"}
    return pages | {f"notebooks/{path.stem}": path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}


def environment_of(path: Path) -> dict[str, str]:
    """Return the environment variables with which a page or a notebook runs.

    ``python`` and ``lightning-dist`` are those of the environment of this Python.
    """
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["COLUMNS"] = "120"
    if TORCHVISION.is_dir() and any(name in path.read_text() for name in _USES_TORCHVISION):
        known = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([str(TORCHVISION), *known])
    return environment


def run_tutorial(name: str, path: Path, limit_s: float, logs: Path) -> Failure | None:
    """Run a page or a notebook in a temporary folder with a copy of the examples.

    Args:
        name: Name of the tutorial.
        path: Path of its page or notebook.
        limit_s: Seconds that a page, or a cell of a notebook, may take.
        logs: Folder that gets a file with all commands and their output.
    """
    log_path = logs / f"{name.replace('/', '_')}.log"
    place = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    with tempfile.TemporaryDirectory(prefix="tutorial-") as folder, log_path.open("w") as log:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples", ignore=_NOT_COPIED)
        if path.suffix == ".ipynb":
            return run_notebook(path, place, Path(folder), environment_of(path), limit_s, log)
        try:
            found = commands(path)
        except ValueError as error:
            return Failure(place, "bash", str(error), "")
        if not found:
            return Failure(place, "bash", "the page has no bash block", "")
        return run_commands(found, place, Path(folder), environment_of(path), limit_s, log)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tutorials that are named, or all of them, and return the exit code."""
    known = tutorials()
    parser = argparse.ArgumentParser("python -m tests.tutorials", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="tutorials to run, all by default: " + ", ".join(known)
    )
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="time limit of a page (600)")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs/tutorials", help="folder of the commands' output")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no tutorial is called {', '.join(unknown)}; there are {', '.join(known)}")
    options.logs.mkdir(parents=True, exist_ok=True)
    failures = []
    for name in options.names or known:
        began = time.monotonic()
        failure = run_tutorial(name, known[name], options.limit, options.logs)
        print(f"{name}: {'failed' if failure else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
        failures += [failure] if failure else []
    print(f"The output of all commands is in {options.logs}.")
    for failure in failures:
        print(f"\nfailed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # The shell of the page must end too.
    sys.exit(main())
