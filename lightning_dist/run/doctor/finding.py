"""Define what a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Status", "failed"]

Status = Literal["pass", "warn", "fail", "skip"]
"""``"warn"``: a run works, but slower or less safely than it could. ``"fail"``: a run fails, or goes wrong. ``"skip"``:
not measured."""


@dataclass(frozen=True)
class Finding:
    """Hold what one check has found.

    Args:
        name: What was checked, such as ``"clocks"``.
        status: Whether the check has passed, warns, or has failed.
        seen: Sentences that say what was measured or read, and what it means.
        advice: Sentences that say what to do; empty if there is nothing to do.
    """

    name: str
    status: Status
    seen: str
    advice: str = ""


def failed(findings: list[Finding]) -> bool:
    """Return whether any finding is a failure."""
    return any(finding.status == "fail" for finding in findings)
