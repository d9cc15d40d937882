import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

# Two cores: more threads than that in four ranks only get in each other's way. Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.pool import WorkerPool, fork_server


def pytest_sessionstart() -> None:
    """It imports for seconds: meanwhile, this process collects the tests."""
    fork_server("tests.preload_more")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def reference_pool() -> Iterator[WorkerPool]:
    """For what one process computes, :func:`tests.pool.beside` the ranks that are compared with it."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def empty_mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, which MLflow takes seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}")
    return path


@pytest.fixture
def mlflow_folder(tmp_path: Path, empty_mlflow_database: Path) -> Path:
    """A folder of its own, with an empty MLflow database in it."""
    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    return tmp_path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix", choices=["pairwise", "full"], default="pairwise", help="which combinations the parity tests run"
    )


def pytest_collection_finish() -> None:
    """What was imported stays: a fit, which collects garbage, need not look through it."""
    gc.collect()
    gc.freeze()
