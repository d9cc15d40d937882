"""Of the processes of a run that fail with the same error, exactly one prints it."""

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_dist.cli import errors
from lightning_dist.cli.failures import Progress, report_failure
from lightning_dist.mesh.consensus import OtherRankError


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set the environment of a process of a run, and shorten the time that a rank waits for another to report."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(errors, "_GRACE_S", 0.3)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "12345")
    for variable in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_a_single_process_prints_its_error_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MASTER_PORT")
    started = time.monotonic()
    assert errors.report("wrong", 2) == 2
    assert time.monotonic() - started < 0.2
    assert capsys.readouterr().err == "error: wrong\n"
    assert list(run.iterdir()) == []


@pytest.mark.parametrize(
    ("reports", "printed"),
    [
        ([(0, "same"), (1, "same"), (2, "same")], "error: same\n"),
        ([(1, "only here")], "[rank 1] error: only here\n"),
        ([(1, "shared"), (3, "shared")], "[rank 1] error: shared\n"),
        ([(0, "one"), (1, "another")], "error: one\n[rank 1] error: another\n"),
        ([(0, "again"), (0, "again")], "error: again\nerror: again\n"),
    ],
)
@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "LOCAL_RANK"])
def test_an_error_of_several_ranks_is_printed_once(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reports: list[tuple[int, str]],
    printed: str,
    variable: str,
) -> None:
    for rank, text in reports:
        monkeypatch.setenv(variable, str(rank))
        assert errors.report(text, 2) == 2
    assert capsys.readouterr().err == printed


def test_errors_with_the_same_cause_are_printed_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert errors.report(f"frames of {rank}", 1, prefix="", cause="boom") == 1
    assert capsys.readouterr().err == "frames of 0\n"


def test_another_rank_waits_for_rank_0_to_print_the_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    other = threading.Thread(target=errors.report, args=("late", 2))
    other.start()
    time.sleep(0.1)
    monkeypatch.setenv("RANK", "0")
    errors.report("late", 2)
    other.join()
    assert capsys.readouterr().err == "error: late\n"


def test_errors_of_an_earlier_run_on_the_same_port_are_ignored(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    errors.report("old", 2)
    (marker,) = (path for folder in run.iterdir() for path in folder.iterdir())
    os.utime(marker, (time.time() - 3600,) * 2)
    monkeypatch.setenv("RANK", "1")
    assert errors.reported_by_another() is None
    errors.report("old", 2)
    assert capsys.readouterr().err == "error: old\n[rank 1] error: old\n"


def test_errors_of_a_run_on_another_port_are_ignored(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    errors.report("x", 2)
    assert errors.reported_by_another() == 2
    monkeypatch.setenv("MASTER_PORT", "54321")
    assert errors.reported_by_another() is None


@pytest.mark.parametrize(
    "error",
    [
        OtherRankError("loading failed on 1 of 2 ranks"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7183"),
        torch.distributed.DistBackendError("NCCL communicator was aborted"),
    ],
)
def test_an_error_that_follows_from_another_ranks_error_is_not_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    monkeypatch.setenv("RANK", "1")
    errors.report("the cause", 2)
    monkeypatch.setenv("RANK", "0")
    assert report_failure(error, Progress()) == 2
    assert capsys.readouterr().err == "[rank 1] error: the cause\n"


def test_a_lost_connection_is_printed_if_no_rank_reported_its_cause(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert report_failure(RuntimeError("Connection reset by peer"), Progress()) == 1
    assert capsys.readouterr().err == "RuntimeError: Connection reset by peer\n"


@pytest.mark.parametrize(
    ("name", "end"),
    [("hybird_shard", "; did you mean 'hybrid_shard'?"), ("full", "; did you mean 'full_shard'?"), ("zz", ".")],
)
def test_the_closest_known_name_is_suggested(name: str, end: str) -> None:
    assert errors.closest(name, ["hybrid_shard", "full_shard"]) == end


def test_the_users_line_is_that_of_the_first_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    try:
        try:
            tempfile.TemporaryDirectory(dir=tmp_path / "missing")
        except FileNotFoundError as cause:
            raise ValueError("wrapped") from cause
    except ValueError as error:
        line = errors.users_line(error)
    number = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.lstrip().startswith("tempfile.TemporaryDirectory")
    )
    assert line.startswith(f"\n  at test_cli_errors.py:{number}, in test_the_users_line_is_that_of_the_first_cause (")
