"""A model whose MLPs and loss are computed a few tokens at a time has the gradients and weights of one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from lightning_dist.run.parity import assert_parity
from tests.parity.run import Case, Outcome, briefly, reference, run, tensors
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

BOTH = (("tiled_mlp", 3), ("tiled_loss", 3))
LOSS = (("tiled_loss", 3),)
CHECKPOINTED = ("activation_checkpointing", "full")
CASES = [
    Case("2x2", "gpt", 3, 0.1, options=BOTH),
    Case("4x1", "example_gpt", 1, None, options=BOTH),
    Case("1x4", "llama3", 1, None, options=(*BOTH, CHECKPOINTED)),
    Case("full_shard", "qwen", 1, None, options=BOTH),
    Case("full_shard", "gpt2", 2, 0.1, optimizer="adamw", options=BOTH),
    Case("1x4", "mixtral", 1, None, options=LOSS),
    Case("full_shard", "bart", 1, None, options=LOSS),
    Case("1x4", "t5", 1, None, options=BOTH),
    Case("cp2", "llama3", 1, None, options=BOTH),
    Case("cp2 x pp2", "gpt", 1, None, options=BOTH),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--matrix") == "full"
        metafunc.parametrize("case", CASES if is_full else one_in(6, briefly(CASES)), ids=str)


@functools.cache
def one_process(pool: WorkerPool, case: Case) -> Outcome:
    return pool.run(reference, 1, case)[0]


def test_gradients_and_weights_equal_those_of_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, case: Case
) -> None:
    outcomes, expected = in_parallel(
        lambda: pool.run(run, 4, case), lambda: one_process(reference_pool, replace(case, layout="", options=()))
    )
    for actual, wanted in zip(outcomes[0].gradients, expected.gradients, strict=True):
        assert_parity(tensors(actual), tensors(wanted), 1e-10)
    tolerance = 1e-6 if case.optimizer == "adamw" else 1e-10
    assert_parity(tensors(outcomes[0].weights), tensors(expected.weights), tolerance)
