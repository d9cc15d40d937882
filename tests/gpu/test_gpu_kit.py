"""Test the kit that checks the project on GPUs, on CPUs: its list, its messages, how it continues, and its page."""

from __future__ import annotations

import json
import os
import pickle
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import torch

from examples.gpt.model import GPT
from lightning_dist.techniques.offload import OffloadOptions
from tests.gpu.__main__ import main
from tests.gpu.check import CUDA, Check, Found, capability, devices, memory_gib, package
from tests.gpu.checks import CHECKS, speed
from tests.gpu.checks.parity import case_parity
from tests.gpu.checks.sizes import SIZES, flops_per_token, num_parameters
from tests.gpu.checks.synchronizations import SynchronizingLines
from tests.gpu.kit import run_checks
from tests.gpu.machine import Device, Machine
from tests.gpu.ranks import LOG, Processes, Ranks, _on_rank
from tests.gpu.results import Results
from tests.parity.run import Case, run
from tests.pool import RankFailed

CPU = Machine("cpu", (), {"torch": "2.0"}, ("torchao",))
H100 = Machine("cuda", (Device("NVIDIA H100 80GB HBM3", 79.0, (9, 0)),), {"torch": "2.0"}, ())


def raise_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        raise LookupError("only rank 1")


def passing(ranks: Ranks, number: int) -> Found:
    return Found(f"figure {number}", details=("a detail",))


def too_slow(ranks: Ranks) -> Found:
    return Found("ratio 0.900", is_met=False, details=("ours 9, theirs 10",))


def raising(ranks: Ranks) -> Found:
    raise ZeroDivisionError("of the check itself")


def failing_rank(ranks: Ranks) -> Found:
    ranks.run(raise_on_rank_one, 2)
    return Found()


def hanging_rank(ranks: Ranks) -> Found:
    ranks.run(time.sleep, 1, 1000)
    return Found()


CHECKED = (
    Check("first/fails", "Broken", failing_rank, limit_s=60),
    Check("first/raises", "Broken", raising),
    Check("first/hangs", "Broken", hanging_rank, limit_s=3, is_alone=True),
    Check("second/passes", "Sound", passing, (7,)),
    Check("second/slow", "Sound", too_slow),
    Check("third/gpu", "Sound", passing, (8,), (CUDA,)),
    Check("third/float8", "Sound", passing, (9,), (package("torchao"),)),
)


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes("cpu")
    yield started
    started.close()


def states(results: Results) -> dict[str, str]:
    return {name: row["state"] for name, row in results.checks.items()}


def test_the_kit_continues_after_failures_and_where_it_stopped(
    processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path, CPU)
    not_started = run_checks(CHECKED, CPU, processes, results, seconds=0)
    assert not_started == [check.name for check in CHECKED[:5]]
    assert set(states(results).values()) == {"not started", "left out"}

    results = Results(tmp_path, CPU)
    assert not run_checks(CHECKED, CPU, processes, results, seconds=60)
    assert states(results) == {
        "first/fails": "failed", "first/raises": "failed", "first/hangs": "out of time", "second/passes": "passed",
        "second/slow": "not met", "third/gpu": "left out", "third/float8": "left out",
    }  # fmt: skip
    page = results.page.read_text()
    assert "# lightning-dist on no GPU (cpu)" in page
    assert "Of 7 checks: 1 passed, 1 not met, 2 failed, 1 out of time, 2 left out." in page
    assert "| not installed: torchao | left out: float8 |" in page
    assert "| `second/passes` | passed | 0.0 s | figure 7 |" in page
    assert page.index("## Broken") < page.index("## Sound") < page.index("## Failures") < page.index("## Not run")
    failures = page[page.index("## Failures") : page.index("## Details")]
    assert "rank 1:\nTraceback" in failures and "LookupError: only rank 1" in failures
    assert "rank 0" not in failures.partition("first/raises")[0]
    assert "ZeroDivisionError: of the check itself" in failures
    assert "the rank hung for" in failures
    assert "ratio 0.900\nours 9, theirs 10" in failures
    assert "- the check needs a CUDA device: `third/gpu`\n- torchao is not installed: `third/float8`" in page

    capsys.readouterr()
    results = Results(tmp_path, CPU)
    assert not run_checks(CHECKED, CPU, processes, results, seconds=60)
    assert not capsys.readouterr().out, "a check has run again"
    run_checks(CHECKED, CPU, processes, results, seconds=60, again="second/*")
    assert [line.split()[-3] for line in capsys.readouterr().out.splitlines()] == ["second/passes", "second/slow"]


def test_a_check_in_which_the_kit_ended_runs_again(processes: Processes, tmp_path: Path) -> None:
    check = CHECKED[3]
    Results(tmp_path, CPU).record(check, "running")
    results = Results(tmp_path, CPU)
    assert states(results) == {"second/passes": "interrupted"}
    assert results.is_due(check, None) and results.is_due(check, "failed")
    run_checks([check], CPU, processes, results, seconds=60)
    assert states(Results(tmp_path, CPU)) == {"second/passes": "passed"}


def test_a_file_is_continued_on_later_days_unless_all_is_repeated(tmp_path: Path) -> None:
    old = Results(tmp_path, H100)
    old.record(CHECKED[3], "passed", figure="7", seconds=1.0, details=[])
    assert old.path.name == f"{datetime.now():%Y-%m-%d}-nvidia-h100-80gb-hbm3.json"
    older = tmp_path / "2020-01-31-nvidia-h100-80gb-hbm3.json"
    old.path.rename(older)
    assert Results(tmp_path, H100).path == older
    assert not Results(tmp_path, CPU).checks
    new = Results(tmp_path, H100, begins=True)
    assert new.path == old.path and not new.checks


def test_a_real_check_passes_on_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--only"]
    assert main([*arguments, "parity-2/data_parallel"]) == 0
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["checks"]
    assert rows["parity-2/data_parallel"]["state"] == rows["parity-2/data_parallel-resnet"]["state"] == "passed"
    printed = capsys.readouterr().out
    assert "no GPU (cpu)" in printed and "largest relative error" in printed
    page = file.with_suffix(".md").read_text()
    assert "Of 2 checks: 2 passed." in page
    assert "- not selected: `environment/*` (5)" in page
    assert main([*arguments, "nothing like this"]) == 2
    assert "--only nothing like this: no check has such a name" in capsys.readouterr().err


def test_a_difference_from_one_process_is_found(processes: Processes) -> None:
    """Two replicas of half the batch each cannot have the gradients of BatchNorm over four parts."""
    ranks = Ranks(CPU, processes, 60)
    case = Case("data_parallel", "resnet", 1, None, num_steps=2)
    assert case_parity(ranks, 2, case).is_met
    from tests.gpu.checks import parity

    parity._references[(Case("", "resnet", 1, None, num_steps=2), 2)] = ranks.run(parity.reference, 1, case, 4)[0]
    found = case_parity(ranks, 2, case)
    parity._references.clear()
    assert not found.is_met
    assert any("has a relative error of" in line for line in found.details)


def test_without_a_gpu_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("python -m tests.gpu: this machine has no GPU that torch can use")
    assert captured.err.count("\n") == 1


def test_checks_have_unique_names_and_can_be_sent_to_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [check.name for check in CHECKS]
    assert len(set(names)) == len(names) > 200
    for check in CHECKS:
        pickle.dumps((check.run, check.args))


def test_needs_are_judged_by_the_machine() -> None:
    assert memory_gib(75).is_met(H100) and not memory_gib(80).is_met(H100)
    assert capability(8, 9).is_met(H100) and not capability(10, 0).is_met(H100)
    assert CUDA.is_met(H100) and not CUDA.is_met(CPU)
    assert not devices(2).is_met(H100) and not package("torchao").is_met(CPU)
    late = [check.name for check in CHECKS if check.reason_to_leave_out(H100) == "the check needs 2 devices"]
    assert late and all("devices" in name or name.startswith("pytest") for name in late)


@pytest.mark.parametrize(("name", "expected"), [("124M", 124e6), ("1B", 1e9)])
def test_models_have_the_size_in_their_names(name: str, expected: float) -> None:
    size = SIZES[name]
    with torch.device("meta"):
        model = GPT(**size.model)
    products = sum(param.numel() for param in model.parameters() if param.ndim > 1)
    assert num_parameters(size) == products == pytest.approx(expected, rel=0.05)
    attention = 12 * size.num_layers * size.dim * size.context
    assert flops_per_token(size) == 6 * (products - model.embedding.weight.numel()) + attention


def test_lines_that_wait_for_the_device_are_counted() -> None:
    lines = SynchronizingLines()
    lines.begin()
    for _ in range(3):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    warnings.warn("something else", stacklevel=1)
    lines.end()
    ((line, number),) = lines.lines.items()
    assert number == 3
    assert line.startswith("tests/gpu/test_gpu_kit.py:") and "called a synchronizing" in line


def test_every_way_of_training_runs_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device of a thread that a comparison starts would otherwise be the first one on every rank."""
    calls: list[object] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setitem(speed.WAYS, "plain", lambda size, end_step: calls.append("trains"))
    speed._train("plain", SIZES["1B"], lambda loss: False)
    assert calls == [3, "trains"]


def test_an_error_in_a_kernel_is_not_hidden_by_the_errors_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_kernel() -> None:
        raise ArithmeticError("device-side assert")

    def fail_again() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail_again)
    monkeypatch.delenv(LOG, raising=False)
    with pytest.raises(ArithmeticError, match="device-side assert"):
        _on_rank(None, failing_kernel, ())


def backend_with_offloaded_params() -> str | None:
    return OffloadOptions("params").backend(None, torch.device("cuda"))


def test_ranks_that_share_a_device_use_the_backend_of_the_kit(processes: Processes) -> None:
    """Strategies must call the functions that the kit replaces, whose names belong to Lightning and torch."""
    ranks = Ranks(CPU, processes, 60)
    assert ranks.run_over("imagined", backend_with_offloaded_params, 1) == ["cpu:gloo,cuda:imagined"]
    with pytest.raises(RankFailed, match=r"(?i)imagined"):
        ranks.run_over("imagined", run, 1, Case("full_shard", "gpt", 1, None, num_steps=1))
