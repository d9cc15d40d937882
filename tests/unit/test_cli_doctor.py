"""The command that examines nodes prints its findings, and refuses wrong arguments."""

from __future__ import annotations

import io
import json
import shutil
import socket
from pathlib import Path

import pytest
from rich.console import Console

from lightning_dist.cli.doctor import ranks
from lightning_dist.cli.doctor.reachability import reach
from lightning_dist.cli.doctor.table import print_findings
from lightning_dist.run.doctor.examination import Check
from lightning_dist.run.doctor.finding import Finding
from lightning_dist.run.doctor.profile import MachineProfile
from tests.command import run_command


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command in an empty folder, with the default MLflow store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


def test_one_process_measures_what_it_can_and_says_what_it_cannot(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--accelerator=cpu", "--json", "--write=profile.json"]
    assert run_command(monkeypatch, *arguments) == 0
    printed = json.loads(capfd.readouterr().out)
    statuses = {finding["name"]: finding["status"] for finding in printed["findings"]}
    assert printed["passed"]
    assert {name for name, status in statuses.items() if status == "skip"} == {"links", "data loading"}
    assert statuses.keys() >= {"versions", "environment", "limits", "devices", "checkpoint folder", "MLflow"}
    profile = MachineProfile.read("profile.json")
    assert (profile.backend, profile.num_nodes, profile.links) == ("", 1, ())
    assert len(profile.devices) == 1
    assert json.loads(json.dumps(printed["profile"])) == json.loads(
        json.dumps(
            {key: value for key, value in json.loads(Path("profile.json").read_text()).items() if key != "format"}
        )
    )
    assert 1e8 < profile.devices[0].flops_per_s["float32"] < 1e13
    assert 1e8 < profile.devices[0].memory_bytes_per_s < 1e12
    assert sorted(path.name for path in Path().iterdir() if path.name.startswith(".lightning")) == []


@pytest.mark.parametrize(
    ("status", "code", "summary"),
    [
        ("warn", 0, "0 passed, 1 warned, 0 failed, 1 not measured"),
        ("fail", 1, "0 passed, 0 warned, 1 failed, 1 not measured"),
    ],
)
def test_only_a_failure_changes_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], status: str, code: int, summary: str
) -> None:
    planted = Finding("planted", status, "This was seen.", "Do this.")  # type: ignore[arg-type]
    skipped = Finding("other", "skip", "This was not measured.")
    monkeypatch.setattr(ranks, "CHECKS", (Check("planted", lambda examination: [planted]),))
    monkeypatch.setattr(ranks, "further_checks", lambda uri: (Check("other", lambda examination: [skipped]),))
    assert run_command(monkeypatch, "doctor", "--accelerator=cpu") == code
    lines = [line.rstrip() for line in capfd.readouterr().out.splitlines()]
    assert lines == [
        f"{status}  planted  This was seen.", "               -> Do this.", "skip  other    This was not measured.", "",
        summary,
    ]  # fmt: skip


def test_long_findings_are_folded_in_a_narrow_terminal() -> None:
    output = io.StringIO()
    print_findings([Finding("clocks", "pass", "word " * 30)], Console(file=output, width=60))
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("pass  clocks  word word")
    assert lines[1].startswith("              word")
    assert max(map(len, lines)) <= 60


MISTAKES = [
    (["--devices=0"], {}, "--devices=0: expected at least 1."),
    (["--write=nowhere/p.json"], {}, "--write='nowhere/p.json': there is no folder"),
    (
        ["--devices=3"],
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
        "--devices=3, but torchrun started 4 processes on this node. Leave --devices out",
    ),
    ([], {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=0 is set, but LOCAL_WORLD_SIZE is not a number."),
    ([], {"SLURM_STEP_NUM_TASKS": "8"}, "srun has started 8 tasks, which do not know each other."),
    (["--accelerator=gpu"], {"CUDA_VISIBLE_DEVICES": ""}, "--accelerator=gpu: 1 ranks on this node need a GPU each"),
    (["--accelerator=tpu"], {}, "argument --accelerator: invalid choice: 'tpu'"),
]


@pytest.mark.parametrize(("arguments", "environment", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run_command(monkeypatch, "doctor", *arguments) == 2
    assert message in capfd.readouterr().err


def test_a_wrong_interface_is_named_before_the_ranks_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**launched, "GLOO_SOCKET_IFNAME": "none0"}.items():
        monkeypatch.setenv(name, value)
    assert run_command(monkeypatch, "doctor", "--accelerator=cpu") == 1
    printed = capfd.readouterr().err
    assert (
        "GLOO_SOCKET_IFNAME='none0': this host has no interface named none0, so that its ranks cannot conn" in printed
    )


def test_a_dead_server_is_found() -> None:
    finding = reach("http://127.0.0.1:9")
    assert (finding.name, finding.status) == ("MLflow", "fail")
    assert finding.seen.startswith("The store http://127.0.0.1:9 does not answer, after ")
    assert "s: [Errno 111] Connection refused. A run would keep what it logs in a local file." in finding.seen
    assert "Start the server" in finding.advice


def test_a_server_that_never_answers_is_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = reach(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert finding.status == "fail"
    assert "does not answer, after 1." in finding.seen
    assert "timed out. A run" in finding.seen


def test_a_store_in_a_file_is_found(empty_mlflow_database: Path, tmp_path: Path) -> None:
    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    finding = reach(f"sqlite:///{tmp_path}/mlflow.db")
    assert finding.status in ("pass", "warn")
    assert "answers in" in finding.seen
    finding = reach(f"sqlite:///{tmp_path}/new/runs.db")
    assert finding.status == "pass"
    assert f"The first run makes the file {tmp_path}/new/runs.db." in finding.seen
    assert not (tmp_path / "new").exists()
