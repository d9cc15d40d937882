"""The campaigns, on a sample of their points."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

from tests.faults.__main__ import main
from tests.pool import WorkerPool


def campaigns() -> tuple[int, str]:
    with redirect_stdout(StringIO()) as printed:
        exit_code = main(["--quick"])
    return exit_code, printed.getvalue()


def test_no_fault_loses_or_mixes_a_checkpoint() -> None:
    """In a process of its own: the campaigns fork, which a process with threads cannot safely do."""
    pool = WorkerPool()
    try:
        ((exit_code, printed),) = pool.run(campaigns, 1, timeout_s=280)
    finally:
        pool.close()
    assert exit_code == 0, printed
    assert len(printed.splitlines()) == 8, printed
    assert "previous" in printed
    assert "new" in printed
    assert "1 kills" in printed
