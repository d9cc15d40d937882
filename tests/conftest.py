import gc
import os
from collections.abc import Iterator

import pytest

# Two cores: more threads than that in four ranks only get in each other's way. Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix", choices=["pairwise", "full"], default="pairwise", help="which combinations the parity tests run"
    )


def pytest_collection_finish() -> None:
    """What was imported stays: a fit, which collects garbage, need not look through it."""
    gc.collect()
    gc.freeze()
