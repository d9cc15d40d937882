"""Test that the peak of a device that is in no data sheet is measured once on a machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_dist.run.telemetry import peak
from lightning_dist.run.telemetry.peak import Peak, peak_of

CPU = torch.device("cpu")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Let each measurement give another number, and return the numbers that were given."""
    monkeypatch.setenv("LIGHTNING_DIST_CACHE", str(tmp_path / "cache"))
    given: list[float] = []

    def measure(device: torch.device, dtype: torch.dtype) -> Peak:
        given.append(1e12 * (len(given) + 1))
        return Peak(given[-1], "measured")

    monkeypatch.setattr(peak, "measured_peak", measure)
    yield given
    peak_of.cache_clear()


def fresh(dtype: torch.dtype = torch.float32) -> Peak:
    """Return what a process finds that has not asked before."""
    peak_of.cache_clear()
    return peak_of(CPU, dtype)


def test_later_runs_have_the_peak_of_the_first(measured: list[float], tmp_path: Path) -> None:
    first = fresh()
    assert fresh() == first == Peak(1e12, first.source)
    (path,) = (tmp_path / "cache").glob("peaks-*.json")
    assert str(path) in first.source
    assert measured == [1e12]


def test_dtypes_have_peaks_of_their_own(measured: list[float]) -> None:
    assert fresh().flops_per_s != fresh(torch.bfloat16).flops_per_s
    assert len(measured) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"%s": 3}'])
def test_a_damaged_file_is_no_error(measured: list[float], tmp_path: Path, content: str) -> None:
    fresh()
    (path,) = (tmp_path / "cache").glob("peaks-*.json")
    (key,) = json.loads(path.read_text())
    path.write_text(content.replace("%s", key))
    assert fresh().flops_per_s == 2e12


def test_without_a_folder_it_is_not_kept(
    measured: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGHTNING_DIST_CACHE", str(tmp_path / "file" / "cache"))
    assert (fresh().flops_per_s, fresh().flops_per_s) == (1e12, 2e12)


def test_a_product_is_timed() -> None:
    assert peak.measured_peak(CPU, torch.float32, 64).flops_per_s > 1e6
