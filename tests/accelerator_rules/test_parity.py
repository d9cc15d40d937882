"""Training on the simulated accelerator equals one process on the CPU, and no operations race."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from lightning_dist.run.parity import assert_parity
from lightning_dist.techniques.activation_checkpointing import offload
from tests.parity.pipeline_run import PipelineCase, PipelineOutcome, one_process, pipelined
from tests.parity.run import Case, Outcome, reference, run, tensors
from tests.pool import WorkerPool, in_parallel

STEPS = 3


def _case(layout: str, model: str, accumulate: int = 1, clip: float | None = None, **options: object) -> Case:
    return Case(layout, model, accumulate, clip, num_steps=STEPS, options=tuple(options.items()))


BRIEF = [
    _case("4x1", "gpt"),
    _case("full_shard", "gpt", 3, 0.1),
    _case("full_shard", "llama", activation_checkpointing="offload"),
    _case("cp2", "llama3", attention="ulysses"),
    _case("ep2", "mixtral"),
]
MORE = [
    _case("4x1", "resnet", 3, 0.1),
    _case("4x1", "gan"),
    _case("2x2", "gpt", 3, 0.1),
    _case("full_shard", "gpt", 3, zero_stage=1),
    _case("full_shard", "gpt", 3, zero_stage=2),
    _case("full_shard", "gpt", offload="optimizer"),
    _case("2x2", "gpt", 3, 0.1, offload="optimizer"),
    _case("4x1", "llama", activation_checkpointing="offload"),
    _case("2x2", "llama", 3, activation_checkpointing="full"),
    _case("tp2", "example_gpt", 1, 0.1),
    _case("2xtp2", "gpt"),
    _case("cp4", "gpt", attention="all_gather"),
    _case("2xcp2", "gpt", 3, 0.1),
    _case("2xep2", "plain_moe", 3, 0.1),
]
PIPELINES = [
    PipelineCase("deep_gpt", "pp2", "1f1b", num_steps=STEPS),
    PipelineCase("deep_gpt", "pp2 x shard2", "interleaved_1f1b", accumulate=2, clip=0.1, num_steps=STEPS),
    PipelineCase("deep_gpt", "pp2", "interleaved_zero_bubble", num_steps=STEPS),
    PipelineCase("deep_llama", "pp2 x tp2", "1f1b", num_steps=STEPS),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_full = metafunc.config.getoption("--matrix") == "full"
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", BRIEF + MORE if is_full else BRIEF, ids=str)
    if "pipeline" in metafunc.fixturenames:
        metafunc.parametrize("pipeline", PIPELINES if is_full else PIPELINES[:1], ids=str)


def _moving_all(case: Case) -> Outcome:
    offload.MIN_NUMEL = 1  # The tensors of these models are small.
    return run(case)


@functools.cache
def _expected(pool: WorkerPool, case: Case) -> Outcome:
    return pool.run(reference, 1, case)[0]


def _num_ranks(case: Case) -> int:
    return 4 if case.layout in ("4x1", "2x2", "cp4") or case.layout.startswith("2x") else 2


def test_gradients_and_weights_equal_those_of_one_process_on_the_cpu(
    simulated: WorkerPool, reference_pool: WorkerPool, case: Case
) -> None:
    outcomes, expected = in_parallel(
        lambda: simulated.run(_moving_all, _num_ranks(case), case),
        lambda: _expected(reference_pool, replace(case, layout="", options=())),
    )
    assert len(expected.gradients) == 2
    for actual, wanted in zip(outcomes[0].gradients, expected.gradients, strict=True):
        assert_parity(tensors(actual), tensors(wanted), 1e-10)
    assert_parity(tensors(outcomes[0].weights), tensors(expected.weights), 1e-10)
    for other in outcomes[1:]:
        for name, weight in other.weights.items():
            np.testing.assert_array_equal(weight, outcomes[0].weights[name])


@functools.cache
def _expected_of_pipeline(pool: WorkerPool, case: PipelineCase) -> PipelineOutcome:
    return pool.run(one_process, 1, case)[0]


def test_pipelines_equal_one_process_on_the_cpu(
    simulated: WorkerPool, reference_pool: WorkerPool, pipeline: PipelineCase
) -> None:
    layout = {1: "pp2", 2: "pp2 x shard2"}[pipeline.num_data_parallel]
    outcomes, expected = in_parallel(
        lambda: simulated.run(pipelined, pipeline.world_size, pipeline),
        lambda: _expected_of_pipeline(reference_pool, replace(pipeline, layout=layout, schedule="1f1b")),
    )
    for actual, wanted in zip(outcomes[0].gradients, expected.gradients, strict=True):
        assert_parity(tensors(actual), tensors(wanted), 1e-10)
    assert_parity(tensors(outcomes[0].weights), tensors(expected.weights), 1e-10)
    if pipeline.num_data_parallel == 1:
        np.testing.assert_allclose(outcomes[0].losses, expected.losses, rtol=1e-10)
