import os
from collections.abc import Iterator

import pytest

from tests.accelerator import VARIABLE
from tests.accelerator_rules import NAME
from tests.pool import WorkerPool


@pytest.fixture(scope="session")
def workers_with_accelerator() -> Iterator[WorkerPool]:
    """Return a pool for the simulated accelerator; skip the test if it cannot be compiled."""
    from tests.accelerator_rules.build import compiled, reason_not_to_compile

    if reason := reason_not_to_compile():
        pytest.skip(reason)
    compiled()
    workers = WorkerPool(has_nccl_rules=True)
    yield workers
    workers.close()


@pytest.fixture
def simulated(workers_with_accelerator: WorkerPool, environment: None) -> WorkerPool:
    """Return a pool whose ranks train on the simulated accelerator."""
    os.environ[VARIABLE] = NAME  # The workers get it when they start.
    return workers_with_accelerator
