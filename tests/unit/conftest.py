import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, which MLflow takes seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}")
    return path


@pytest.fixture
def workplace(tmp_path: Path, empty_mlflow_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, with an empty MLflow database in it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path
