"""A type checker sees the public names and their types from a user's program, and finds his mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dist

_ROOT = Path(__file__).parents[2]

_PROGRAM = """\
import lightning as L
import torch
from lightning_dist import {names}
from lightning_dist.plugins.callbacks import LoadPretrained, StepTelemetry


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).sum()
        return loss


def size(trainer: L.Trainer) -> int:
    return per_rank_batch_size(64, trainer)


strategy = HybridShardStrategy(dp_replicate_size=2, checkpoint=CheckpointOptions(keep_last=2))
callbacks = [FaultTolerance(), StepTelemetry(), LoadPretrained("folder", prefix="net.")]
trainer = L.Trainer(strategy=strategy, callbacks=callbacks, logger=MLflowLogger(), plugins=MeshPrecision("kahan"))
with full_parameters(Net()) as whole:
    pass
layout: ParallelLayout = ParallelLayout(dp_shard=2)
HybridShardStrategy(dp_replicate_size="two")  # WRONG
per_rank_batch_size("64", trainer)  # WRONG
CheckpointOptions(keep_lst=2)  # WRONG
layout.dp_shrad  # WRONG
full_parameters()  # WRONG
"""


@pytest.mark.slow
def test_a_users_program_is_checked(tmp_path: Path) -> None:
    assert (_ROOT / "lightning_dist/py.typed").is_file()
    program = tmp_path / "users.py"
    program.write_text(_PROGRAM.format(names=", ".join(sorted(lightning_dist.__all__))))
    # With the configuration of this repository, mypy has checked the package before, and reads its results.
    words = [sys.executable, "-m", "mypy", "--no-color-output", str(program)]
    ended = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, timeout=280)
    found = {int(line) for line in re.findall(r"users\.py:(\d+): error", ended.stdout)}
    lines = _PROGRAM.splitlines()
    assert found == {number for number, line in enumerate(lines, 1) if line.endswith("# WRONG")}, ended.stdout
