"""Test saves under faults by running the fault campaigns on a sample of their points."""

from __future__ import annotations

import os
import sys

import pytest

from tests.faults.__main__ import main
from tests.launched import Forked


def campaigns() -> None:
    sys.exit(main(["--quick"]))


@pytest.mark.thorough
def test_no_fault_loses_or_mixes_a_checkpoint() -> None:
    """Run the campaigns in a process of their own, because they fork, which is unsafe in a process with threads."""
    process = Forked(campaigns, environment=dict(os.environ), is_parent=True)
    try:
        printed, _ = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    assert len([line for line in printed.splitlines() if line.endswith(" s)")]) == 8, printed
    assert "previous" in printed
    assert "new" in printed
    assert "1 kills" in printed
