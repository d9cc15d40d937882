"""Test the benchmark itself: every kind of case runs, and its verdicts and messages are right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import cases
from tests.bench.cases import CASES, Case, Result, Settings
from tests.bench.harness import Pairs

QUICK = [
    "step-2-full_shard-by_hand_two_shot",
    "step-2-full_shard-model_parallel",
    "half_wide_step-2-full_shard_bf16-full_shard",
    "startup-2-hybrid_1x2-ddp",
    "memory-2-full_shard-by_hand",
    "step-2-tensor_parallel-by_hand_tp",
    "long_step-2-context_parallel-by_hand_cp",
    "step-2-expert_parallel-by_hand_ep",
    "step-2-pipeline_1f1b-by_hand_1f1b",
    "traffic-2-tensor_parallel-formula",
    "stall-2-asynchronous-synchronous",
    "write-2-full_shard-model_parallel",
    "load-2-full_shard-raw",
]


@pytest.mark.thorough
def test_every_kind_of_case_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    exit_code = bench.main(["--quick", "--json", str(out), *(arg for name in QUICK for arg in ("--case", name))])
    shown = capsys.readouterr().out
    assert exit_code == 0, shown
    rows = json.loads(out.read_text())["cases"]
    assert sorted(row["name"] for row in rows) == sorted(QUICK)
    for row in rows:
        assert math.isfinite(row["median"]), row
        assert min(row["ours"] + row["theirs"]) > 0, row
        assert row["name"] in shown


def test_a_missing_package_is_named_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "missing_package", lambda name: name)
    assert bench.main(["--quick", "--case", "step-2-full_shard_zero_3-deepspeed_3"]) == 0
    assert 'pip install "lightning-dist[bench]"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "is_narrow", "verdict", "exit_code"),
    [
        ([1.01] * 6, True, "met", 0),
        ([1.01, 1.01, 1.01, 1.01, 1.03, 1.03], False, "TOO WIDE", 1),
        ([0.8, 0.9, 0.9, 0.9, 1.0, 1.0], False, "met", 0),
        ([1.03] * 6, True, "NOT MET", 1),
        ([1.03] * 6, False, "NOT MET", 1),
    ],
)
def test_a_missed_bound_is_reported_and_fails(
    ours: list[float],
    is_narrow: bool,
    verdict: str,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(case: Case, settings: Settings) -> Result:
        return Result(case, Pairs(ours, [1.0] * 6), is_narrow)

    monkeypatch.setattr(bench, "measure", measured)
    assert bench.main(["--case", "step-2-full_shard-by_hand_two_shot"]) == exit_code
    assert capsys.readouterr().out.rstrip().endswith(verdict)


@pytest.mark.parametrize(("ours", "verdict"), [(0.98, "NOT MET"), (0.995, "met"), (1.005, "met"), (1.02, "NOT MET")])
def test_a_figure_below_at_least_misses_the_bound(ours: float, verdict: str) -> None:
    case = Case("traffic", 2, "tensor_parallel", "formula", bound=1.01, at_least=0.99)
    assert Result(case, Pairs([ours], [1.0]), is_narrow=True).verdict == verdict


def test_an_unknown_case_is_an_error_that_names_it_and_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--case", "step-3-*"])
    message = capsys.readouterr().err
    assert "step-3-*" in message
    assert CASES[0].name in message


def test_the_names_of_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
