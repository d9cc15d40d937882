"""A model that is cut into stages has the same gradients, weights and logged metrics as in one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from lightning_dist.run.parity import assert_parity
from lightning_dist.techniques.pipeline import SCHEDULES
from tests.parity.pipeline_run import PipelineCase, PipelineOutcome, one_process, pipelined
from tests.parity.run import briefly, tensors
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

MODELS = [
    "deep_llama", "deep_gpt2", "bert", "deep_t5", "deep_batch_norm", "sequential", "deep_encoder", "unet",
    "deep_mixtral", "dropout",
]  # fmt: skip
LAYOUTS = ["pp2 x tp2", "pp2 x shard2", "pp2 x replicate2 x shard2"]
SCHEDULED = [
    # dualpipev needs at least as many microbatches as there are stages, of which each rank has two.
    PipelineCase("deep_gpt", layout, schedule, num_microbatches=8 if schedule == "dualpipev" else 4)
    for schedule in SCHEDULES
    for layout in ("pp2", "pp4")
]
SPREAD = [
    PipelineCase(model, layout)
    for model in ["deep_gpt", *MODELS]
    for layout in LAYOUTS
    # Ranks that split a layer draw the dropout of their parts separately, unlike one process.
    if (model, layout) != ("dropout", "pp2 x tp2")
]
EXTRA = [
    PipelineCase("deep_gpt", "pp2", accumulate=3, clip=0.1),
    PipelineCase("deep_gpt2", "pp2 x shard2", "interleaved_1f1b", accumulate=2, clip=0.1),
    PipelineCase("deep_llama", "pp4", precision="32-true"),
    PipelineCase("deep_gpt", "pp2 x tp2", "zbv", clip=0.1),
    PipelineCase("dropout", "pp2 x shard2", "interleaved_1f1b", accumulate=2),
]
# Together with EXTRA, these cases have every model, every schedule and every layout.
SOME = [
    PipelineCase("deep_llama", "pp2", "gpipe"),
    PipelineCase("deep_gpt", "pp2", "interleaved_zero_bubble"),
    PipelineCase("deep_gpt", "pp2", "dualpipev"),
    PipelineCase("deep_gpt", "pp4", "looped_bfs"),
    *(PipelineCase(model, "pp2") for model in ("bert", "deep_t5", "deep_batch_norm", "deep_encoder", "unet")),
    PipelineCase("deep_mixtral", "pp2"),
    PipelineCase("sequential", "pp2 x replicate2 x shard2"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--matrix") == "full"
        every = list(dict.fromkeys([*SCHEDULED, *SPREAD, *SOME, *EXTRA]))
        metafunc.parametrize("case", every if is_full else one_in(6, briefly(SOME + EXTRA)), ids=str)


def test_the_subset_covers_every_axis() -> None:
    cases = [*SOME, *EXTRA]
    assert {case.model for case in cases} == {"deep_gpt", *MODELS}
    assert {case.schedule for case in cases} == set(SCHEDULES)
    assert {case.layout for case in cases} == {"pp2", "pp4", *LAYOUTS}


@functools.cache
def expected(pool: WorkerPool, case: PipelineCase) -> PipelineOutcome:
    return pool.run(one_process, 1, case)[0]


def test_gradients_weights_and_losses_equal_those_of_one_process(
    pool: WorkerPool, reference_pool: WorkerPool, case: PipelineCase
) -> None:
    # Cases with equally many data-parallel ranks have the same reference, which the cache computes once.
    reference_layout = {1: "pp2", 2: "pp2 x shard2", 4: "pp2 x replicate2 x shard2"}[case.num_data_parallel]
    outcomes, wanted = in_parallel(
        lambda: pool.run(pipelined, case.world_size, case),
        lambda: expected(reference_pool, replace(case, layout=reference_layout, schedule="1f1b")),
    )
    tolerance = 1e-5 if case.precision == "32-true" else 1e-10
    for actual, reference in zip(outcomes[0].gradients, wanted.gradients, strict=True):
        assert_parity(tensors(actual), tensors(reference), tolerance)
    assert_parity(tensors(outcomes[0].weights), tensors(wanted.weights), tolerance)
    for outcome in outcomes:
        if case.num_data_parallel == 1:
            np.testing.assert_allclose(outcome.losses, wanted.losses, rtol=tolerance)
        for logged, reference in zip(outcome.logged, wanted.logged, strict=True):
            assert logged.keys() == reference.keys()
    for other in outcomes[1:]:
        for name, weight in other.weights.items():
            np.testing.assert_array_equal(weight, outcomes[0].weights[name])
