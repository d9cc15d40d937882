"""The host waits for no more in a step than is known and accepted."""

from __future__ import annotations

import pytest

from tests.accelerator_rules.host_waits import measure, waits_per_step
from tests.accelerator_rules.rows import ROWS
from tests.pool import WorkerPool

# The numbers are the most that a rank may wait in a step, with and without clipping. Copies of the batch are made by
# Lightning, from the pageable memory of the data loader, and so are digests of batches.
MOST: dict[str, dict[str, float]] = {
    "data_parallel": {"pageable": 2},  # With and without compression.
    "full_shard": {"pageable": 2},
    "hybrid_shard": {"pageable": 2},
    "tensor_parallel": {"pageable": 3},
    "context_parallel": {"pageable": 3},
    "pipeline_parallel": {"pageable": 3, "gloo": 1},
    # There are four layers of experts in the first model, and two in the second one.
    "expert parallel": {"pageable": 2, "device to host": 4},
    "expert parallel, grouped products": {"pageable": 2, "device to host": 2},
    "expert parallel, grouped products and capacity": {"pageable": 2},
    "experts over tp, grouped products and capacity": {"pageable": 3},
    # An optimizer that is not fused must know whether all gradients are finite.
    "data_parallel, int8, optimizer that is not fused": {"pageable": 2, "device to host": 1, "gloo": 1},
}
TWICE = ("expert parallel", "expert parallel, grouped products")
"""Rows whose blocks wait again when activation checkpointing runs them again."""

BRIEF = (
    "data_parallel, clip", "full_shard, stream", "pipeline_parallel, 1f1b",
    "expert parallel, grouped products and capacity", "data_parallel, int8, optimizer that is not fused",
)  # fmt: skip


def _most(name: str, kind: str) -> float:
    plain = next(row for row in sorted(MOST, key=len, reverse=True) if name.startswith(row))
    is_again = plain in TWICE and name.endswith("activation checkpointing") and kind != "pageable"
    return MOST[plain].get(kind, 0) * (2 if is_again else 1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = [name for name in ROWS if any(name.startswith(row) for row in MOST)]
    is_full = metafunc.config.getoption("--matrix") == "full"
    metafunc.parametrize("name", every if is_full else BRIEF)


def test_the_host_waits_for_no_more_than_is_known(simulated: WorkerPool, name: str) -> None:
    for waits in simulated.run(measure, ROWS[name].num_ranks, name):
        numbers = waits_per_step(waits)
        numbers.pop("model")
        too_many = {kind: number for kind, number in numbers.items() if number > _most(name, kind)}
        lines = "\n".join(f"{wait.what} at {wait.site}" for wait in waits if wait.kind in too_many)
        assert not too_many, f"{too_many}:\n{lines}"
