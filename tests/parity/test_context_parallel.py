"""A model whose blocks run on parts of the sequence has the same gradients and weights as in one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from lightning_dist.run.parity import assert_parity
from tests.parity.run import CP_LAYOUTS, SEQUENCE_MODELS, Case, Outcome, briefly, reference, run, tensors
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

MODELS = ("gpt", "example_gpt", "llama3", "qwen", "gpt2", "mixtral", "bart", "vit", "encoder", *SEQUENCE_MODELS)
ALL_GATHER = (("attention", "all_gather"),)
EVERY = [
    Case(layout, model, 1, None, options=options)
    for model in MODELS
    for layout in CP_LAYOUTS
    for options in ((), ALL_GATHER)
]
EXTRA = [
    Case("2xcp2", "gpt", 3, 0.1),
    Case("cp2", "llama3", 2, 0.1, optimizer="adamw"),
    Case("cp4", "gpt", 1, None, precision="32-true"),
]


def covering(cases: list[Case]) -> list[Case]:
    """Choose two cases of each model, so that every layout occurs with both kinds of attention."""
    return [case for index, case in enumerate(cases) if index % 5 == (index // 10) % 5]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--matrix") == "full"
        metafunc.parametrize("case", EVERY + EXTRA if is_full else one_in(6, briefly(covering(EVERY) + EXTRA)), ids=str)


@functools.cache
def one_process(pool: WorkerPool, case: Case) -> Outcome:
    return pool.run(reference, 1, case)[0]


def test_gradients_and_weights_equal_those_of_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, case: Case
) -> None:
    outcomes, expected = in_parallel(
        lambda: pool.run(run, 4, case), lambda: one_process(reference_pool, replace(case, layout="", options=()))
    )
    tolerance = 1e-5 if case.precision == "32-true" else 1e-10
    for actual, wanted in zip(outcomes[0].gradients, expected.gradients, strict=True):
        assert_parity(tensors(actual), tensors(wanted), tolerance)
    tolerance = 1e-6 if case.optimizer == "adamw" else tolerance
    assert_parity(tensors(outcomes[0].weights), tensors(expected.weights), tolerance)
    for other in outcomes[1:]:
        for name, weight in other.weights.items():
            np.testing.assert_array_equal(weight, outcomes[0].weights[name])
