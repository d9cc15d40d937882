"""Test that versions of torch and Lightning that the package was not made for are warned of."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path

import lightning
import pytest
import torch

from lightning_dist.plugins.versions import SUPPORTED, warn_of_other_versions


def test_the_installed_versions_are_supported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_versions()


@pytest.mark.parametrize(
    ("package", "version", "is_supported"),
    [
        (torch, "2.11.0+cu130", True),
        (torch, "2.13.1", True),
        (torch, "2.14.0.dev20261101", False),
        (torch, "2.9.1", False),
        (lightning, "2.6.0", True),
        (lightning, "2.7.0rc1", False),
        (lightning, "3.0.0", False),
    ],
    ids=str,
)
def test_another_version_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, package: object, version: str, is_supported: bool
) -> None:
    monkeypatch.setattr(package, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_other_versions()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (0 if is_supported else 1)
    assert is_supported or f"{version} is installed, but lightning-dist is made for" in texts[0]


def test_the_package_declares_the_range_that_is_supported() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, (first, end) in SUPPORTED.items():
        assert f"{name}>={first[0]}.{first[1]},<{end[0]}.{end[1]}" in declared
