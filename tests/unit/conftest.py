import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_process_group_afterwards() -> Iterator[None]:
    """Destroy a process group that a test leaves behind in this process, by failing or by training here."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def workplace(mlflow_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to this test's temporary folder, which has an empty MLflow database in it, and return it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(mlflow_folder)
    return mlflow_folder
