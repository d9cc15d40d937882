"""A training of replicas that are killed and come back equals one process with the same members in each step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import one_in


@pytest.mark.parametrize(
    ("ranks", "options"),
    one_in(3, [(1, ()), (2, ()), (1, ("--fixed-batch", "--nodes=2"))]),
)
def test_replicas_are_killed_and_come_back(tmp_path: Path, ranks: int, options: tuple[str, ...]) -> None:
    # The bound of the stall is that of a quiet machine.
    words = ["--replicas=2", f"--ranks={ranks}", "--kills=2", "--heartbeat=1", f"--folder={tmp_path / 'run'}"]
    found = subprocess.run(
        [sys.executable, "-m", "tests.elastic", *words, "--any-stall", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, f"{found.stdout}{found.stderr}{(tmp_path / 'run/kills/launch.txt').read_text()}"
    assert "without a mistake" in found.stdout
