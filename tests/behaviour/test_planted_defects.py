"""Test that the cases in low precision find defects that are as small as one rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.behaviour.case import Run
from tests.behaviour.matrix import Observed, compare, load_cases, run_on_rank
from tests.pool import WorkerPool


def _round(tensors: Any) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.bfloat16().to(tensor.dtype))


def _plant(model: Any, defect: str) -> None:
    if defect == "statistics":
        model.on_train_batch_end = lambda *_: _round(b for name, b in model.named_buffers() if "running" in name)
    elif defect == "gradients":
        model.on_after_backward = lambda: _round(param.grad for param in model.parameters())
    elif defect == "weights":
        model.on_train_batch_end = lambda *_: _round(model.parameters())


def run_planted(name: str, column: str, folder: str, defect: str) -> Observed:
    """Run a case whose module rounds what ought to be kept in float32."""
    original = Run.fit

    def fit(run: Run, model: Any, *args: Any, **kwargs: Any) -> Any:
        _plant(model, defect)
        return original(run, model, *args, **kwargs)

    Run.fit = fit  # type: ignore[method-assign]
    try:
        return run_on_rank(name, column, folder)
    finally:
        Run.fit = original  # type: ignore[method-assign]


@pytest.mark.parametrize("precision", ["bf16_mixed", "16_mixed"])
def test_the_cases_of_batch_norm_find_values_that_are_rounded(pool: WorkerPool, tmp_path: Path, precision: str) -> None:
    name = f"buffers_and_precision.batch_norm_{precision}"
    expected = pool.run(run_on_rank, 2, name, "ddp2", str(tmp_path))[0]
    for defect in ("none", "statistics", "gradients", "weights"):
        found = pool.run(run_planted, 2, name, "full", str(tmp_path), defect)[0]
        assert not found.error, found.trace
        problems = compare(found.values, expected.values, load_cases()[name].tolerance)
        assert bool(problems) == (defect != "none"), (defect, problems)
