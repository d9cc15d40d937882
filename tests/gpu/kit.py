"""Run checks one after another, until all have run or the time is used up."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.check import Check, Found
from tests.gpu.machine import Machine
from tests.gpu.page import write_page
from tests.gpu.ranks import Processes, Ranks
from tests.gpu.results import Results
from tests.pool import RankFailed

__all__ = ["run_checks", "shorten"]

ROOT = Path(__file__).parents[2]
LINES_OF_TRACEBACK = 16
TIMED_OUT = "hung for"
STOPPED = "was still running when another rank had failed"


def run_checks(
    checks: Sequence[Check],
    machine: Machine,
    processes: Processes,
    results: Results,
    seconds: float,
    again: str | None = None,
    every: Sequence[Check] | None = None,
) -> list[str]:
    """Run the checks that are due, in order, and write file and page after each.

    Args:
        checks: The checks, in order.
        machine: The machine, which decides what is left out.
        processes: The processes in which checks run.
        results: Where results are kept.
        seconds: Time after which no further check is started.
        again: What to repeat (:meth:`Results.is_due`).
        every: All checks, of which the page names those that were not selected. None: ``checks``.

    Returns:
        Names of the checks that were not started, because the time was used up.
    """
    end, not_started = time.monotonic() + seconds, []
    processes.backend = results.content.get("backend") or processes.backend
    for check in checks:
        if reason := check.reason_to_leave_out(machine):
            results.record(check, "left out", figure=reason)
        elif not results.is_due(check, again):
            continue
        elif time.monotonic() >= end:
            not_started.append(check.name)
            if results.checks.get(check.name, {}).get("state") is None:
                results.record(check, "not started", figure="the time was used up")
        else:
            run_check(check, machine, processes, results)
            results.content["backend"] = processes.backend
            row = results.checks[check.name]
            print(f"{row['state']:<12}{row['seconds']:>7.1f} s  {check.name:<58}{row['figure']}", flush=True)
        results.save()
        write_page(results, every or checks)
    return not_started


def run_check(check: Check, machine: Machine, processes: Processes, results: Results) -> None:
    """Run one check and record its result, whatever happens in it."""
    results.record(check, "running")
    start = time.monotonic()
    ranks = Ranks(machine, processes, check.limit_s, check.is_alone, check.spreads)
    found, error = Found(), ""
    try:
        found = check.run(ranks, *check.args)
        state = "passed" if found.is_met else "not met"
    except RankFailed as failure:
        error = shorten(failure)
        state = "out of time" if any(TIMED_OUT in text for text in failure.errors.values()) else "failed"
    except Exception as failure:
        state, error = "failed", _last_lines("".join(traceback.format_exception(failure)))
    finally:
        ranks.close()
    # The stacks of ranks that are still running end with the outermost line, which says nothing.
    is_late = state == "out of time"
    figure = f"not finished after {check.limit_s:g} s" if is_late else found.figure or _message(error)
    results.record(
        check, state, seconds=time.monotonic() - start, figure=figure, details=list(found.details), error=error
    )


def shorten(failure: RankFailed) -> str:
    """Return the ends of the tracebacks, once for ranks with the same one, and last the one that came first.

    Ranks that were only stopped because another one had failed are left out.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(failure.errors.items()):
        if STOPPED not in text or len(failure.errors) == 1:
            ranks_of.setdefault(_last_lines(text), []).append(rank)
    return "\n\n".join(f"rank {', '.join(map(str, ranks))}:\n{text}" for text, ranks in reversed(ranks_of.items()))


def _message(error: str) -> str:
    """Return the last line that names an exception, or else the last line."""
    lines = error.splitlines() or [""]
    named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Failed|Interrupt)\b", line)]
    return (named or lines)[-1][:160]


def _last_lines(text: str) -> str:
    text = re.sub(r'File "[^"]*/site-packages/', 'File "', text).replace(f"{ROOT}/", "")
    lines = [line for line in text.rstrip().splitlines() if not re.fullmatch(r"\s*[\^~]+\s*", line)]
    cut = ["  ..."] if len(lines) > LINES_OF_TRACEBACK else []
    return "\n".join(cut + lines[-LINES_OF_TRACEBACK:])
