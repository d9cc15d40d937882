import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

# Several ranks share a few cores, so more than one thread per rank would slow them down. torch reads this variable when
# it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.pool import WorkerPool, fork_server


def pytest_sessionstart() -> None:
    """Start the fork server now, since it imports for seconds, during which this process can collect the tests."""
    fork_server("tests.preload_more")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def reference_pool() -> Iterator[WorkerPool]:
    """Return a second pool, which computes a reference in one process while ``pool`` runs the compared ranks.

    The two are run at the same time by :func:`tests.pool.in_parallel`.
    """
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def empty_mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of an empty MLflow database, made once per session because MLflow needs seconds to make one."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}")
    return path


@pytest.fixture
def mlflow_folder(tmp_path: Path, empty_mlflow_database: Path) -> Path:
    """Return this test's temporary folder, with an empty MLflow database ``mlflow.db`` in it."""
    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    return tmp_path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix", choices=["pairwise", "full"], default="pairwise", help="which combinations the parity tests run"
    )


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collection, since every fit would otherwise traverse them."""
    gc.collect()
    gc.freeze()
