from pathlib import Path

import pytest


@pytest.fixture
def workplace(mlflow_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to this test's temporary folder, which has an empty MLflow database in it, and return it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(mlflow_folder)
    return mlflow_folder
