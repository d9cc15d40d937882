"""The command profile records the steps that it is asked for, on every rank, and refuses steps that do not exist."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_dist.cli import main
from lightning_dist.plugins.callbacks import ProfileSteps
from tests.unit.test_cli_fit import Data, Net, all_runs

pytestmark = pytest.mark.usefixtures("workplace")

HERE = "tests.unit.test_cli_fit"
FLAGS = [
    f"--model={HERE}.Net",
    f"--data={HERE}.Data",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


def profile(*arguments: str) -> int:
    sys.argv = ["lightning-dist", "profile", *FLAGS, *arguments]
    try:
        return main()
    except SystemExit as stop:
        return int(stop.code or 0)


def events(trace: Path) -> list[dict[str, Any]]:
    content: dict[str, Any] = json.loads(gzip.decompress(trace.read_bytes()))
    return content["traceEvents"]


def profiled(folder: str) -> int:
    os.chdir(folder)
    Net.trainers.clear()
    code = profile(
        "--trainer.devices=2", "--trainer.strategy=full_shard", "--trainer.max_steps=4", "--steps=1:3", "--output=out"
    )
    assert [trainer.global_step for trainer in Net.trainers] == [3]
    return code


def test_a_trace_of_the_steps_is_written_on_every_rank(pool: Any, workplace: Path) -> None:
    assert pool.run(profiled, 2, str(workplace)) == [0, 0]
    for rank in range(2):
        names = [event.get("name", "") for event in events(workplace / "out" / f"rank{rank}.json.gz")]
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
        assert names.count("Optimizer.step#SGD.step") == 2
        assert "aten::addmm" in names
    (run,) = all_runs()
    artifacts = workplace / "mlruns" / "lightning_logs" / run.info.run_id / "artifacts" / "profile"
    assert sorted(path.name for path in artifacts.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]


def test_the_first_step_can_be_recorded_and_the_operators_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val/loss", "--trainer.logger=false")
    with caplog.at_level("INFO"):
        assert profile("--steps=0:1", *flags) == 0
    (printed,) = (message for message in caplog.messages if "operator (rank 0)" in message)
    assert "Traces of steps 0 to 0: profile/rank*.json.gz" in printed
    assert "https://ui.perfetto.dev" in printed
    rows = printed[printed.index("operator (rank 0)") :].splitlines()[1:11]
    assert all(row.endswith("%") for row in rows)
    shares = [float(row.split()[-1].rstrip("%")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 101


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=13:10"], "--steps=13:10 has no step, because END is not recorded: write, for example, --steps 10"),
        (["--steps=3:3"], "--steps=3:3 has no step, because END is not recorded: write, for example, --steps 3:4"),
        (["--steps=abc"], "--steps=abc is no range FIRST:END of steps: write, for example, --steps 10:13"),
        ([], "--steps is missing: name the steps to record, such as --steps 10:13"),
        (
            ["--steps=3:9", "--trainer.max_steps=4"],
            "--steps=3:9: trainer.max_steps=4 ends the run before step 9: choose steps up to 4, or set",
        ),
        (
            ["--steps=3:9", "--trainer.max_epochs=1"],
            "but the run ends before step 8: choose earlier steps",
        ),
    ],
)
def test_steps_that_do_not_exist_are_refused(capfd: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert profile(*flags) == 2
    assert message in capfd.readouterr().err


def test_the_callback_refuses_an_empty_range_and_steps_before_a_resume(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"ProfileSteps\(first=3, end=3\): expected 0 <= first < end"):
        ProfileSteps(3, 3)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=4, enable_checkpointing=False, **options)
    loader: DataLoader[Any] = Data().train_dataloader()
    trainer.fit(Net(), loader)
    trainer.save_checkpoint(tmp_path / "4.ckpt")
    resumed = Trainer(max_steps=8, callbacks=[ProfileSteps(3, 6)], enable_checkpointing=False, **options)
    with pytest.raises(MisconfigurationException, match="resumes at step 4: choose steps from 5 on"):
        resumed.fit(Net(), loader, ckpt_path=tmp_path / "4.ckpt")
