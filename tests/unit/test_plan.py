"""Test the layouts of a plan, and the command that prints it."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_dist.cli import main
from lightning_dist.plugins.planning import Layout, Planned, layouts_of
from lightning_dist.plugins.planning.forked import in_fork
from lightning_dist.plugins.planning.memory_of import parse_memory
from lightning_dist.plugins.planning.trained import Trained

FLAGS = [
    "--model=tests.unit.test_cli_fit.Net",
    "--data=tests.unit.test_cli_fit.Data",
    "--trainer.accelerator=cpu",
]


def planned(*arguments: str) -> int:
    sys.argv = ["lightning-dist", "plan", *FLAGS, *arguments]
    try:
        return main()
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize(("num_nodes", "num_devices"), [(1, 1), (1, 4), (2, 8), (3, 6), (8, 8)])
def test_layouts_use_all_ranks_and_split_layers_within_a_node(num_nodes: int, num_devices: int) -> None:
    found = layouts_of(num_nodes, num_devices)
    assert len(found) == len(set(found))
    assert all(layout.num_ranks == num_nodes * num_devices for layout in found)
    assert all(num_devices % (layout.tp * layout.cp) == 0 for layout in found)
    assert found[0] == Layout(num_nodes * num_devices)


def test_layouts_of_two_nodes() -> None:
    assert [str(layout) for layout in layouts_of(2, 1)] == ["dp_replicate 2", "dp_shard 2", "pp 2"]
    assert "dp_replicate 2 x dp_shard 4" in [str(layout) for layout in layouts_of(2, 4)]


def test_a_layout_fits_if_it_needs_at_most_90_percent() -> None:
    assert Planned(Layout(2), 10, 90).fits(100)
    assert not Planned(Layout(2), 10, 91).fits(100)
    assert Planned(Layout(2), 10, 91).fits(None)
    assert not Planned(Layout(2), None, None, "refused").fits(None)


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("1.5 GB", 1_500_000_000), ("500MiB", 500 * 2**20)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_memory(text, "memory") == size


def test_the_command_prints_what_fits_and_writes_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert planned("--nodes=2", "--devices=1", "--memory=1GiB", "--write=best.yaml", "--json") == 0
    of = {(entry["dp_replicate_size"], entry["dp_shard_size"]): entry for entry in json.loads(capsys.readouterr().out)}
    assert of[2, 1]["fits"]
    assert of[1, 2]["fits"]
    assert 0 < of[2, 1]["resident_bytes"] < of[2, 1]["peak_bytes"] < 10_000
    assert "pipeline" in of[1, 1]["why_not"]
    best = yaml.safe_load(Path("best.yaml").read_text())
    assert best["trainer"]["strategy"]["init_args"]["dp_replicate_size"] == 2
    assert planned("--nodes=2", "--devices=1", "--memory=0.0001MiB") == 1
    assert "No layout needs at most 90% of a device. The closest is dp_" in capsys.readouterr().out


def test_a_fit_stores_its_choice_and_logs_how_good_the_prediction_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    steps = ["--trainer.max_epochs=null", "--trainer.max_steps=12", "--trainer.limit_val_batches=0"]
    sys.argv = [
        "lightning-dist", "fit", *FLAGS, *logger, *steps, "--trainer.strategy=auto_parallel", "--trainer.devices=1",
    ]  # fmt: skip
    assert main() == 0
    (config,) = Path("logs").rglob("config.yaml")
    strategy = yaml.safe_load(config.read_text())["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_dist.AutoParallelStrategy"
    sizes = {name: size for name, size in strategy["init_args"].items() if name.endswith("_size") and size}
    assert sizes == {f"{axis}_size": 1 for axis in ("pp", "dp_replicate", "dp_shard", "tp", "cp")}
    (metrics,) = Path("logs").rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.read_text().splitlines()))
    (row,) = [row for row in rows if row.get("plan/step_ms")]
    predicted, measured = float(row["plan/step_ms_predicted"]), float(row["plan/step_ms"])
    assert float(row["plan/step_ms_error"]) == pytest.approx(predicted / measured - 1)
    assert "auto_parallel: 1 rank, the only layout" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--devices=2", "--memory=80"], "--memory=80 is no size: give a number and a unit, such as 80GiB, 80GB"),
        (["--devices=2", "--memory=1.2.3GiB"], "--memory=1.2.3GiB is no size"),
        (["--devices=0"], "--devices=0: a plan needs a number of at least 1, such as --devices=8."),
        (["--trainer.devices=auto"], "--devices=auto: a plan needs a number of at least 1"),
        (["--memroy=80GiB"], "did you mean '--memory'?"),
    ],
)
def test_mistakes_are_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(*arguments) == 2
    assert text in capsys.readouterr().err


def die_once(mark: Path) -> int:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def test_a_process_that_dies_is_started_once_more(tmp_path: Path) -> None:
    assert in_fork(partial(die_once, tmp_path / "mark")) == 7
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        in_fork(die)


def test_a_process_that_waits_for_a_lock_of_another_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, release = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    forked = sys.modules["lightning_dist.plugins.planning.forked"]
    monkeypatch.setattr(forked, "_STUCK_AFTER_S", 2)
    monkeypatch.setattr(forked, "_LOOK_EVERY_S", 0.5)
    try:
        assert in_fork(os.getpid) != os.getpid()
        with pytest.raises(RuntimeError, match="used no processor time for 2 s"):
            in_fork(lambda: lock.acquire())  # It cannot be pickled, so that this process is forked.
    finally:
        release.set()
        holder.join()


def test_what_is_trained_is_pickled_without_its_trainer() -> None:
    module = BoringModel()
    module._trainer = threading.Lock()  # type: ignore[assignment]
    trained = Trained(module, None, {}, {})
    copied = pickle.loads(pickle.dumps(trained)).module
    assert copied._trainer is None
    assert module._trainer is not None
    assert torch.equal(copied.layer.weight, module.layer.weight)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
