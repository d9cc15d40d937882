"""Test that the project which ``lightning-dist new`` writes trains, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_dist.cli import main

FILES = {"model.py", "data.py", "base.yaml"}


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "mine"
    assert main(["new", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "lightning-dist fit -c base.yaml" in printed
    found = {path.name for path in folder.iterdir() if path.is_file()}
    assert found == FILES
    assert all(f"  {name}\n" in printed for name in FILES)
    return folder


def test_the_project_trains(project: Path, mlflow_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    for name in ("model", "data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    quick = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1"]
    alone = ["--trainer.devices=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    assert main(["fit", "-c", "base.yaml", "-c", "strategies/full_shard.yaml", *alone, *quick]) == 0


def test_a_folder_that_is_not_empty_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("mine")
    assert main(["new", str(tmp_path)]) == 2
    assert f"the folder '{tmp_path}' is not empty. Give the name of a new one." in capsys.readouterr().err
    assert (tmp_path / "model.py").read_text() == "mine"


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["new", str(tmp_path / "file" / "mine")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_every_overlay_names_a_strategy(project: Path) -> None:
    import yaml

    from lightning_dist.cli.options import read

    names = {"ddp", *read("fit").strategies}
    for path in (project / "strategies").glob("*.yaml"):
        strategy = yaml.safe_load(path.read_text())["trainer"]["strategy"]
        name = strategy if isinstance(strategy, str) else strategy["class_path"]
        assert name in names
        assert name == path.stem
