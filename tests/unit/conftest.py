from pathlib import Path

import pytest


@pytest.fixture
def workplace(mlflow_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, with an empty MLflow database in it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(mlflow_folder)
    return mlflow_folder
