"""Test the emulation of nodes with a slow link."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.bench import slow_links
from tests.bench.nodes import why_not


@pytest.mark.thorough
@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}")
def test_compressed_gradients_take_less_of_a_slow_link(capsys: pytest.CaptureFixture[str]) -> None:
    before = _namespaces()
    ways = ["none", "bf16"]
    slow_links.main(
        [
            "--dim=128",
            "--layers=2",
            "--rounds=1",
            "--steps=2",
            "--rates",
            "unshaped",
            "0.1",
            "--opponent=none",
            "--ways",
            *ways,
        ]
    )
    assert _namespaces() == before
    shown = capsys.readouterr().out
    rows = re.findall(r"^ *(unshaped|0\.1) (\w+) +(\d+) ms +([\d.]+) MB$", shown, re.MULTILINE)
    assert [(rate, way) for rate, way, *_ in rows] == [(rate, way) for rate in ("unshaped", "0.1") for way in ways]
    sent = {way: float(megabytes) for rate, way, _, megabytes in rows if rate == "0.1"}
    milliseconds = {way: float(time) for rate, way, time, _ in rows if rate == "0.1"}
    assert sent["bf16"] == pytest.approx(sent["none"] / 2, rel=0.15)
    for way in ways:  # The link cannot be faster than its rate.
        assert milliseconds[way] >= 0.8 * 1000 * 8 * sent[way] / 100, way
    formulas = dict(re.findall(r"^(\w+) +\d+ +\d+ +[\d.]+ +([\d.]+)", shown, re.MULTILINE))
    assert formulas.keys() == {"none", "bf16"}
    for way, megabytes in formulas.items():
        assert sent[way] == pytest.approx(float(megabytes), rel=0.15), way


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_machines_that_cannot_emulate_nodes_are_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slow_links, "why_not", lambda: "not root")
    assert slow_links.main([]) == 2
    assert capsys.readouterr().out == "Slow links cannot be emulated here: not root.\n"
