"""Promise 2 for layers that are split: gradients and weights are those of one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from lightning_dist.parity import assert_parity
from tests.parity.run import TP_LAYOUTS, Case, Outcome, reference, run, tensors
from tests.pool import WorkerPool

CASES = [
    Case("tp4", "gpt", 1, None),
    Case("tp2", "gpt", 4, 0.1),
    Case("tp2", "llama", 1, 0.1),
    Case("2xtp2", "gpt", 1, 0.1),
    Case("2xtp2", "llama", 4, None),
    Case("tp2", "llama", 1, None, optimizer="adamw"),
    Case("tp2", "gpt", 1, None, precision="32-true"),
]


@functools.cache
def one_process(pool: WorkerPool, case: Case) -> Outcome:
    return pool.run(reference, 1, replace(case, layout=""))[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(pool: WorkerPool, case: Case) -> None:
    assert case.layout in TP_LAYOUTS
    outcomes = pool.run(run, 4, case)
    expected = one_process(pool, replace(case, layout=""))
    tolerance = 1e-5 if case.precision == "32-true" else 1e-10
    for actual, wanted in zip(outcomes[0].gradients, expected.gradients, strict=True):
        assert_parity(tensors(actual), tensors(wanted), tolerance)
    weights = tensors(outcomes[0].weights), tensors(expected.weights)
    assert_parity(*weights, 1e-6 if case.optimizer == "adamw" else tolerance)
    for other in outcomes[1:]:
        for name, weight in other.weights.items():
            np.testing.assert_array_equal(weight, outcomes[0].weights[name])
