"""The accelerator reports each wait that is left out, and nothing where none is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator_rules.planted import DEFECTS, train
from tests.pool import RankFailed, WorkerPool

UNLIKE = [
    "reduce-scatter does not wait for gradients",
    "replicas do not wait for their all-reduce",
    "compression does not wait for gradients",
    "optimizer on the CPU does not wait for gradients",
    "gradients on the CPU are used before they have arrived",
    "activations are copied before they are computed",
    "a checkpoint is copied while weights are updated",
]
"""One defect of each kind of training."""


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_reported(simulated: WorkerPool, name: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=DEFECTS[name].finds):
        pytest.fail(f"nothing was reported; calls left out: {simulated.run(train, 2, name, True, tmp_path)}")


@pytest.mark.parametrize("name", UNLIKE)
def test_nothing_is_reported_without_the_defect(simulated: WorkerPool, name: str, tmp_path: Path) -> None:
    assert simulated.run(train, 2, name, False, tmp_path) == [0, 0]
