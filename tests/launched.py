"""Jobs that Lightning's own launcher starts, to be disturbed from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["launch", "wait_for"]


def wait_for(process: subprocess.Popen[str], text: str, count: int) -> str:
    seen = ""
    for line in process.stdout:
        seen += line
        if seen.count(text) >= count:
            return seen
    raise AssertionError(seen)


def launch(script: str, folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Start ``script`` with ``folder`` and ``arguments``, and wait until both of its ranks have printed READY.

    Returns:
        The process of rank 0, and the process id of the other one.
    """
    (folder / "train.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, folder / "train.py", str(folder), *arguments],
        text=True, cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": "."},
    )  # fmt: skip
    wait_for(process, "READY", 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return process, ranks[-1]
