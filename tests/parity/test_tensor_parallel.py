"""A model whose layers are split has the same gradients and weights as in one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_dist.run.parity import assert_parity
from tests.parity.run import SPLIT_MODELS, Case, Outcome, briefly, reference, run, tensors
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

WHOLE = (("sequence_parallel", False), ("loss_parallel", False))
WITHHELD = (("plan", "withheld"),)
EVERY = [
    Case(layout, model, 1, None, options=options)
    for model in SPLIT_MODELS
    for layout in ("tp2", "tp4")
    for options in ((), WHOLE)
] + [Case(layout, model, 1, None, options=WITHHELD) for model in ("llama3", "qwen") for layout in ("tp2", "tp4")]
EXTRA = [
    Case("tp2", "gpt", 3, 0.1),
    Case("2xtp2", "llama3", 2, 0.1),
    Case("tp2", "gpt2", 2, 0.1, optimizer="adamw"),
    Case("2xtp2", "llama", 1, 0.1, precision="32-true"),
    Case("tp4", "gpt", 1, None, precision="32-true"),
]


def covering(cases: list[Case]) -> list[Case]:
    """Choose one or two cases of each model, so that every layout and every option occurs."""
    return [case for index, case in enumerate(cases) if index % 4 == (index // 4) % 4]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--matrix") == "full"
        some = briefly(covering(EVERY) + EXTRA[:-1])
        metafunc.parametrize("case", EVERY + EXTRA if is_full else one_in(6, some), ids=str)


@functools.cache
def one_process(pool: WorkerPool, case: Case) -> Outcome:
    return pool.run(reference, 1, case)[0]


def leave_out(case: Case, names: Any) -> list[str]:
    """Return the weights that are not compared: with Adam, the biases of GPT-2's attention.

    The bias of a key shifts all scores of a query by the same amount, so its true gradient is zero. Adam would divide
    rounding errors by rounding errors.
    """
    return [name for name in names if case.optimizer == "adamw" and name.endswith("c_attn.bias")]


def test_gradients_and_weights_equal_those_of_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, case: Case
) -> None:
    outcomes, expected = in_parallel(
        lambda: pool.run(run, 4, case), lambda: one_process(reference_pool, replace(case, layout="", options=()))
    )
    tolerance = 1e-5 if case.precision == "32-true" else 1e-10
    for actual, wanted in zip(outcomes[0].gradients, expected.gradients, strict=True):
        assert_parity(tensors(actual), tensors(wanted), tolerance)
    adam = case.optimizer == "adamw"
    assert_parity(
        tensors(outcomes[0].weights),
        tensors(expected.weights),
        1e-6 if adam else tolerance,
        leave_out=leave_out(case, expected.weights),
    )
    for other in outcomes[1:]:
        for name, weight in other.weights.items():
            np.testing.assert_array_equal(weight, outcomes[0].weights[name])
