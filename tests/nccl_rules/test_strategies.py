"""Every strategy trains and evaluates under the rules of NCCL as one process does.

``make nccl-rules`` runs all parity and distributed tests under these rules; these are a few of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_dist import DataParallelStrategy, HybridShardStrategy, NDParallelStrategy
from lightning_dist.run.parity import assert_parity
from tests.accelerator import place
from tests.distributed.fit import make_trainer
from tests.models import build
from tests.parity.pipeline_run import PipelineCase, one_process, pipelined
from tests.parity.run import Case, reference, run, tensors
from tests.pool import WorkerPool, in_parallel
from tests.thorough import one_in

CASES = [
    Case("4x1", "resnet", 1, None, num_steps=4),
    Case("2x2", "gpt", 3, 0.1, num_steps=4),
    Case("full_shard", "llama", 1, None, num_steps=4),
    Case("2xtp2", "gpt", 1, 0.1, num_steps=4),
    Case("cp2", "gpt", 1, None, num_steps=4),
    Case("cp2", "gpt", 1, None, num_steps=4, options=(("attention", "all_gather"),)),
    Case("ep2", "mixtral", 1, None, num_steps=4),
]


@pytest.mark.parametrize("case", one_in(3, CASES), ids=str)
def test_training_equals_one_process(ruled_pool: WorkerPool, reference_pool: WorkerPool, case: Case) -> None:
    outcomes, (expected,) = in_parallel(
        lambda: ruled_pool.run(run, 4, case), lambda: reference_pool.run(reference, 1, replace(case, options=()))
    )
    assert_parity(tensors(outcomes[0].gradients[0]), tensors(expected.gradients[0]), 1e-10)
    assert_parity(tensors(outcomes[0].weights), tensors(expected.weights), 1e-10)


@pytest.mark.parametrize("schedule", one_in(2, ["1f1b", "interleaved_zero_bubble"]))
def test_pipelines_equal_one_process(ruled_pool: WorkerPool, reference_pool: WorkerPool, schedule: str) -> None:
    case = PipelineCase("deep_gpt", "pp2 x shard2", schedule, num_steps=4)
    outcomes, (expected,) = in_parallel(
        lambda: ruled_pool.run(pipelined, case.world_size, case),
        lambda: reference_pool.run(one_process, 1, replace(case, schedule="1f1b")),
    )
    assert_parity(tensors(outcomes[0].weights), tensors(expected.weights), 1e-10)


STRATEGIES = {
    "data_parallel": lambda: DataParallelStrategy(),
    "hybrid_shard": lambda: HybridShardStrategy(2, 2),
    "tensor_parallel": lambda: NDParallelStrategy(tp_size=2),
    "context_parallel": lambda: NDParallelStrategy(cp_size=2),
    "split evaluation": lambda: NDParallelStrategy(cp_size=2, split_evaluations=True),
    "pipeline_parallel": lambda: NDParallelStrategy(pp_size=2),
}


def evaluated(name: str) -> tuple[float, float, int]:
    """Return the losses of a validation and a test, and the number of predictions of this rank."""
    model = build("gpt", seed=0)
    trainer = make_trainer(
        "auto",
        **(place(in_one_process=name == "auto")),
        strategy="auto" if name == "auto" else STRATEGIES[name](),
        limit_val_batches=2,
        limit_test_batches=2,
        limit_predict_batches=2,
        precision="64-true",
    )
    (validated,) = trainer.validate(model, verbose=False)
    (tested,) = trainer.test(model, verbose=False)
    predictions = trainer.predict(model) or []
    return validated["val/loss"], tested["test/loss"], sum(map(len, predictions))


@pytest.mark.parametrize("name", one_in(2, STRATEGIES))
def test_evaluations_equal_one_process(ruled_pool: WorkerPool, reference_pool: WorkerPool, name: str) -> None:
    found, ((loss, test_loss, num_predictions),) = in_parallel(
        lambda: ruled_pool.run(evaluated, 4, name), lambda: reference_pool.run(evaluated, 1, "auto")
    )
    np.testing.assert_allclose([row[:2] for row in found], [[loss, test_loss]] * 4, rtol=1e-10)
    assert sum(row[2] for row in found) == num_predictions > 0
