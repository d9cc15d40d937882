"""Trainings on a Ray cluster compute what others do, resume after a failure, and refuse what cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchers.training import fit, losses_of
from tests.pool import WorkerPool

pytest.importorskip("ray", reason="Ray is not installed (the extra 'ray')")


@pytest.fixture(scope="module")
def expected(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with two ranks that Ray has not started, and return the file of their losses."""
    folder = tmp_path_factory.mktemp("expected")
    pool.run(fit, 2, folder, devices=2)
    path = folder / "losses.json"
    path.write_text(json.dumps({row.step: row.loss for row in losses_of(folder, 0)}))
    return path


@pytest.mark.gloo
@pytest.mark.parametrize("scenarios", [["killed_rank", "too_few"], ["train_function", "uneven_nodes"]])
def test_scenarios(expected: Path, scenarios: list[str]) -> None:
    command = [sys.executable, "-m", "tests.launchers.ray", str(expected), *scenarios]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()] == scenarios
