"""Compare the memory that a dry run predicts with that of real ranks."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_dist.plugins.planning import dry_run
from tests.planning.cases import CASES, Case, make
from tests.planning.measured import measure
from tests.pool import WorkerPool
from tests.thorough import one_in

TOLERANCE = 0.01


@pytest.mark.parametrize("case", one_in(22, CASES), ids=str)
def test_a_dry_run_predicts_the_memory_of_each_rank(pool: WorkerPool, case: Case) -> None:
    measured = pool.run(measure, case.num_ranks, case)
    for rank in case.ranks:
        predicted = dry_run(partial(make, case), 1, case.num_ranks, rank)
        assert predicted.resident == pytest.approx(measured[rank].resident, rel=TOLERANCE)
        assert predicted.peak == pytest.approx(measured[rank].peak, rel=case.tolerance)


@pytest.mark.thorough
def test_what_splits_a_model_lowers_its_memory() -> None:
    """A plan that is not carried out in a dry run would predict the memory of the whole model."""
    whole, *split = [
        dry_run(partial(make, Case("GPT", 2, sizes)), 1, 2)
        for sizes in ({"dp_replicate_size": 2}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2, "num_microbatches": 4})
    ]
    assert all(one.resident < 0.7 * whole.resident for one in split)
    assert all(one.peak < 0.7 * whole.peak for one in split)


@pytest.mark.thorough
def test_many_ranks_are_simulated_in_one_process() -> None:
    few = dry_run(partial(make, Case("GPT", 8, {"dp_shard_size": 8, "dp_replicate_size": 1})), 1, 8)
    many = dry_run(partial(make, Case("GPT", 4096, {"dp_shard_size": 8, "dp_replicate_size": 512})), 512, 8)
    # Each rank holds the ranks of the mesh, of 4 bytes each.
    assert many.resident == pytest.approx(few.resident + 4 * 4096, rel=1e-3)
    assert many.peak == pytest.approx(few.peak + 4 * 4096, rel=1e-3)
