"""The campaigns, on a sample of their points."""

from __future__ import annotations

import subprocess
import sys


def test_no_fault_loses_or_mixes_a_checkpoint() -> None:
    """In a process of its own: the campaigns fork, which a process with threads cannot safely do."""
    command = [sys.executable, "-m", "tests.faults", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 8, done.stdout
    assert "previous" in done.stdout
    assert "new" in done.stdout
    assert "1 kills" in done.stdout
