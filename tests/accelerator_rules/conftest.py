from collections.abc import Iterator

import pytest

from tests.accelerator_rules import NAME
from tests.pool import WorkerPool


@pytest.fixture(scope="session")
def simulated() -> Iterator[WorkerPool]:
    """Return a pool whose ranks train on the simulated accelerator; skip the test if it cannot be compiled."""
    from tests.accelerator_rules.build import compiled, reason_not_to_compile

    if reason := reason_not_to_compile():
        pytest.skip(reason)
    compiled()
    workers = WorkerPool(has_nccl_rules=True, accelerator=NAME)
    yield workers
    workers.close()
