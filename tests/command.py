"""Run the command in the process of a test."""

from __future__ import annotations

import sys

import pytest

from lightning_dist.cli import main


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run ``lightning-dist`` with ``arguments``, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lightning-dist", *arguments])
    try:
        return main()
    except SystemExit as stop:
        return int(stop.code)  # type: ignore[arg-type]
