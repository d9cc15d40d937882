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
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenarios", [["killed_rank"], ["train_function"]], ids="-".join)
def test_scenarios(expected: Path, scenarios: list[str]) -> None:
    command = [sys.executable, "-m", "tests.launchers.ray", str(expected), *scenarios]
    found = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()] == scenarios


def test_uneven_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train

    from lightning_dist.plugins import ray as plugin

    class Context:
        def get_local_world_size(self) -> int:
            return 1

        def get_world_rank(self) -> int:
            return 2

    monkeypatch.setattr(ray.train, "get_context", Context)
    monkeypatch.setattr(plugin, "broadcast_from_rank_zero", lambda size: 2)
    with pytest.raises(RuntimeError, match="Ray has placed 1 workers on the node of rank 2, and 2 on"):
        plugin.as_rank(lambda: None)()
