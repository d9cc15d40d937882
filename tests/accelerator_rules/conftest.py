from collections.abc import Iterator

import pytest

from tests.accelerator_rules import NAME
from tests.pool import WorkerPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of this folder time for a compilation of the device, which the first of them may need."""
    for item in items:
        if "accelerator_rules" in item.path.parts:
            item.add_marker(pytest.mark.timeout(900))


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
