"""A sharded run has the same gradients as one process, and the same weights after its last step."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_dist.run.parity import assert_parity
from tests.parity.run import LAYOUTS, Case, Outcome, briefly, reference, run, tensors
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

AXES = {"layout": list(LAYOUTS), "model": ["gpt", "resnet", "gan", "llama"], "accumulate": [1, 3], "clip": [None, 0.1]}
EVERY = [Case(*values) for values in itertools.product(*AXES.values())]
# FullShardStrategy is a hybrid strategy with one replica (1x4), so one case of it is enough.
ONE_REPLICA = Case("1x4", "llama", 3, 0.1)
EXTRA = [
    *(Case(layout, model, 1, None, precision="32-true") for layout in ("full_shard", "2x2") for model in AXES["model"]),
    *(Case(layout, model, 1, None, optimizer="adamw") for layout in ("full_shard", "2x2") for model in AXES["model"]),
]
MEMORY = [("zero_stage", 1), ("zero_stage", 2), ("offload", "both")]
EXTRA += [
    Case("full_shard", model, 3, 0.1, optimizer="adamw", options=(option,))
    for option in MEMORY
    for model in AXES["model"]
]
TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5}
# The bias of a key shifts all scores of a query by the same amount, so its true gradient is zero. Adam would divide
# rounding errors by rounding errors.
TRUE_GRADIENT_IS_ZERO = {"gpt": ["model.blocks.0.qkv.bias", "model.blocks.1.qkv.bias"]}


def pairwise(cases: list[Case]) -> list[Case]:
    """Choose greedily a subset in which every pair of values of two axes occurs."""

    def pairs(case: Case) -> set[tuple[object, ...]]:
        values = [(axis, getattr(case, axis)) for axis in AXES]
        return set(itertools.combinations(values, 2))

    missing = set().union(*(pairs(case) for case in cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        some = [*pairwise([case for case in EVERY if case.layout != "1x4"]), ONE_REPLICA]
        is_full = metafunc.config.getoption("--matrix") == "full"
        # Every fifth case of EXTRA has each model once, each time with another layout or setting.
        metafunc.parametrize("case", EVERY + EXTRA if is_full else one_in(4, briefly(some + EXTRA[::5])), ids=str)


@functools.cache
def one_process(pool: WorkerPool, case: Case) -> Outcome:
    return pool.run(reference, 1, case)[0]


def test_gradients_and_weights_equal_those_of_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, case: Case
) -> None:
    outcomes, expected = in_parallel(
        lambda: pool.run(run, 4, case), lambda: one_process(reference_pool, replace(case, layout=""))
    )
    tolerance = TOLERANCE[case.precision]
    assert len(expected.gradients) == 2
    # The first gradients are from before any weight changed. The GAN's second gradients are of its other optimizer.
    for actual, wanted in zip(outcomes[0].gradients, expected.gradients, strict=True):
        assert_parity(tensors(actual), tensors(wanted), tolerance)
    adam = case.optimizer == "adamw"
    assert_parity(
        tensors(outcomes[0].weights),
        tensors(expected.weights),
        1e-6 if adam else tolerance,
        leave_out=TRUE_GRADIENT_IS_ZERO.get(case.model, ()) if adam else (),
    )
    for other in outcomes[1:]:
        for name, weight in other.weights.items():
            np.testing.assert_array_equal(weight, outcomes[0].weights[name])


def test_each_rank_has_batch_norm_statistics_of_its_part_of_the_batch(pool: WorkerPool) -> None:
    """The statistics of all four ranks together give those of one process that runs the four parts in turn."""
    case = Case("2x2", "resnet", 1, None, num_steps=1)
    outcomes = pool.run(run, 4, case)
    expected = pool.run(reference, 1, case)[0]
    for name in expected.buffers:
        if name.endswith("running_mean"):
            # One process made four updates with momentum 0.1, in the order of the ranks; each rank made one.
            momentum = 0.1
            applied = sum((1 - momentum) ** (3 - rank) * outcome.buffers[name] for rank, outcome in enumerate(outcomes))
            np.testing.assert_allclose(applied, expected.buffers[name], rtol=1e-9, atol=1e-12)
            assert not np.array_equal(outcomes[0].buffers[name], outcomes[1].buffers[name])
