"""Run a part of the behaviour cases, in at most two minutes; ``make behaviour`` runs all of them."""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.behaviour.matrix import Matrix, load_cases
from tests.pool import WorkerPool
from tests.thorough import one_in

COVERED = {
    "basics": ("full", "hybrid", "tp", "pp", "nd"),
    "sharing_and_weights": ("full", "hybrid", "tp"),
    "uneven_ranks": ("full", "hybrid", "tp"),
    "split_layers": ("tp",),
}
"""The columns over which the cases of an area are distributed, by area. Each case runs under one of them."""

FURTHER_CELLS = (
    ("modules.module_reentrant", "pp"),
    ("modules.functional_call_in_validation", "tp"),
    ("layers_and_backwards.embedding_with_max_norm", "nd"),
    ("layers_and_backwards.views_changed_in_place", "full"),
    ("weights_in_hooks.own_values_into_weights", "nd"),
    ("hooks.gathers_in_training", "nd"),
    ("gradient_reduction.cleared_between_backwards", "full"),
    ("gradient_reduction.caught_error_before_direct_backward", "data"),
    ("gradient_reduction.frozen_in_turns_without_sync", "data"),
    ("gradient_reduction.frozen_integers", "tp"),
    ("gradient_reduction.converted_at_start", "nd"),
    ("gradient_reduction.cleared_in_hook", "full"),
    ("unusual_steps.module_zero_grad_in_step", "full"),
    ("unusual_steps.metric_values_kept", "pp"),
    ("unusual_steps.frozen_in_step", "tp"),
    ("pipelines.device_of_parameters", "pp"),
    ("pipelines.early_logs_of_two_stages", "pp"),
    ("fits.two_trainers", "data"),
    ("manual_optimization.gan", "data"),
    ("checkpoints.checkpoint_default", "data"),
    ("uneven_ranks.unused_on_some_ranks", "data"),
    ("uneven_ranks.unused_before_used", "full"),
    ("sharing_and_weights.post_accumulate_hooks", "data"),
    ("split_code.penalty_in_hook", "tp"),
    ("split_code.hook_of_rank_0", "tp"),
    ("split_code.hooks_of_norms", "tp_tokens"),
    ("split_code.late_probe", "tp"),
    ("blocks_by_method.method_and_call_full", "zero_1"),
    ("manual_optimization.hooks_of_two_backwards", "zero_1"),
    ("manual_optimization.gan", "pp"),
    ("modules.module_functional_call", "recompute"),
    ("freezing.input_hook", "recompute"),
    ("python_state.counting_layer", "recompute"),
    ("python_state.second_loader", "tp_tokens"),
    ("python_state.forward_hooks", "tiled"),
    ("language_weights.balancing_bias", "pp"),
)
"""Cases of other areas, each with a column, whose code paths no other test covers."""


def cells_to_run() -> list[tuple[str, str]]:
    """Return each case of :data:`COVERED` with a column, and :data:`FURTHER_CELLS`."""
    in_turn = [
        (name, column)
        for area, columns in COVERED.items()
        for (name, case), column in zip(load_cases().items(), cycle(columns), strict=False)
        if case.area == area
    ]
    return [*in_turn, *FURTHER_CELLS]


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, reference_pool: WorkerPool) -> Matrix:
    return Matrix(pool, reference_pool)


@pytest.mark.parametrize(("name", "column"), one_in(2, cells_to_run()))
def test_the_case_behaves_as_in_one_process(matrix: Matrix, name: str, column: str) -> None:
    cell = matrix.cell(load_cases()[name], column)
    assert cell.is_good, f"{cell.outcome}: {cell.text}"
