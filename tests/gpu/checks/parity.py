"""Compare gradients and weights of ranks with those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lightning_dist.run.parity import errors
from tests.gpu.check import Found
from tests.gpu.ranks import Ranks
from tests.parity.pipeline_run import PipelineCase, one_process, pipelined
from tests.parity.run import Case, reference, run, tensors

__all__ = ["case_parity", "pipeline_parity", "worst_error"]

TOLERANCES = {"64-true": 1e-10, "32-true": 1e-5}

TRUE_GRADIENT_IS_ZERO = ("qkv.bias", "k_proj.bias", "key.bias")
"""Ends of the names of parameters whose exact gradient is zero, by whose rounding errors AdamW divides."""

_references: dict[Any, Any] = {}
"""The outcomes of one process, by case, which several checks compare with."""


def case_parity(ranks: Ranks, num_ranks: int, case: Case) -> Found:
    """Train a case on ranks and in one process, and compare."""
    alone = replace(case, layout="", options=())
    key = (alone, num_ranks)
    if key not in _references:
        _references[key] = ranks.run(reference, 1, alone, num_ranks)[0]
    expected = _references[key]
    if ("step_in_backward", True) in case.options:  # No callback can record gradients that a backward uses up.
        expected = replace(expected, gradients=[])
    return _compare(ranks.run(run, num_ranks, case), expected, case.precision, case.optimizer == "adamw")


def pipeline_parity(ranks: Ranks, case: PipelineCase) -> Found:
    """Train a case as a pipeline and in one process, and compare."""
    layout = {1: "pp2", 2: "pp2 x shard2"}[case.num_data_parallel]
    alone = replace(case, layout=layout, schedule="1f1b")
    if alone not in _references:
        _references[alone] = ranks.run(one_process, 1, alone)[0]
    return _compare(ranks.run(pipelined, case.world_size, case), _references[alone], case.precision, False)


def _compare(outcomes: list[Any], expected: Any, precision: str, is_adam: bool) -> Found:
    tolerance, found = TOLERANCES[precision], []
    for step, (actual, wanted) in enumerate(zip(outcomes[0].gradients, expected.gradients, strict=True)):
        found.append((*worst_error(actual, wanted), tolerance, f"gradients of step {step}"))
    left_out = TRUE_GRADIENT_IS_ZERO if is_adam else ()
    kept = {name: value for name, value in expected.weights.items() if not name.endswith(left_out)}
    weights = {name: outcomes[0].weights[name] for name in kept}
    found.append((*worst_error(weights, kept), 1e-6 if is_adam else tolerance, "weights"))
    differing = sorted(
        {
            name
            for other in outcomes[1:]
            for name, weight in other.weights.items()
            if not np.array_equal(weight, outcomes[0].weights[name])
        }
    )
    details = [
        f"{what}: {name} has a relative error of {error:.1e}, above {bound:.0e}"
        for error, name, bound, what in found
        if not error <= bound
    ]
    details += [f"ranks differ in {name}" for name in differing]
    figure = f"largest relative error {max(error for error, *_ in found):.0e}"
    return Found(figure, not details, tuple(details))


def worst_error(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """Return the largest relative error, and the name of the tensor that has it."""
    found = errors(tensors(actual), tensors(expected))
    name = max(found, key=lambda key: found[key])
    return found[name], name
