from collections.abc import Iterator

import pytest

from tests.nccl_rules.operations import TIMEOUT_VARIABLE
from tests.pool import WorkerPool


@pytest.fixture(scope="session")
def ruled_pool() -> Iterator[WorkerPool]:
    """Provide workers that communicate under the rules of NCCL, whatever ``--backend`` says."""
    workers = WorkerPool(has_nccl_rules=True)
    yield workers
    workers.close()


@pytest.fixture
def impatient_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """Provide workers as :func:`ruled_pool` does, whose waits fail after four seconds."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "4")
    workers = WorkerPool(has_nccl_rules=True)
    yield workers
    workers.close()
