"""Write the results as a page in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tests.gpu.check import Check
from tests.gpu.machine import OPTIONAL_PACKAGES
from tests.gpu.results import FAILED, Results

__all__ = ["write_page"]

NOT_RUN = ("left out", "not started")


def write_page(results: Results, checks: Sequence[Check]) -> None:
    """Write the page beside the file of the results.

    Args:
        results: The results.
        checks: All checks, in the order of the page; those without a result were not selected.
    """
    rows = {check.name: results.checks[check.name] for check in checks if check.name in results.checks}
    rows |= {name: row for name, row in results.checks.items() if name not in rows}
    lines = [
        *_head(results, rows),
        *_table(rows),
        *_failures(rows),
        *_details(rows),
        *_not_run(rows, [check.name for check in checks if check.name not in rows]),
    ]
    results.page.write_text("\n".join(lines).rstrip() + "\n")


def _head(results: Results, rows: dict[str, dict[str, Any]]) -> list[str]:
    machine = results.content["machine"]
    devices = machine["devices"]
    what = f"{len(devices)} x {devices[0]['name']}" if devices else f"no GPU ({machine['kind']})"
    counts = Counter(row["state"] for row in rows.values())
    lines = [f"# lightning-dist on {what}", "", f"{_summary(counts)} They took {_minutes(results.content['seconds'])}."]
    facts = {"begun": results.content["begun"]}
    if devices:
        major, minor = devices[0]["capability"]
        facts["device"] = f"{what}, {devices[0]['memory_gib']:.0f} GiB each, compute capability {major}.{minor}"
    facts |= machine["versions"]
    if backend := results.content.get("backend"):
        facts["ranks that share a device"] = f"communicate over {backend}"
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    lines += [
        f"| not installed: {name} | left out: {OPTIONAL_PACKAGES[name]} |"
        for name in machine["missing"]
        if OPTIONAL_PACKAGES[name] != "nothing here"
    ]
    return [*lines, ""]


def _summary(counts: Counter[str]) -> str:
    parts = [f"{counts[state]} {state}" for state in ("passed", *FAILED, *NOT_RUN) if counts[state]]
    return f"Of {counts.total()} checks: {', '.join(parts)}."


def _table(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    ran = [(name, row) for name, row in rows.items() if row["state"] not in NOT_RUN]
    for section, members in groupby(ran, key=lambda item: item[1]["section"]):
        lines += [f"## {section}", "", "| check | result | time | figure |", "|---|---|--:|---|"]
        for name, row in members:
            state = row["state"] if row["state"] == "passed" else f"**{row['state']}**"
            seconds = f"{row['seconds']:.1f} s" if "seconds" in row else ""
            lines.append(f"| `{name}` | {state} | {seconds} | {_cell(row.get('figure', ''))} |")
        lines.append("")
    return lines


def _failures(rows: dict[str, dict[str, Any]]) -> list[str]:
    failed = {name: row for name, row in rows.items() if row["state"] in FAILED}
    lines = ["## Failures", ""] if failed else []
    for name, row in failed.items():
        text = row.get("error") or "\n".join([row["figure"], *row["details"]])
        lines += [f"### `{name}`", "", f"{row['state'].capitalize()}:", "", "```", text, "```", ""]
    return lines


def _details(rows: dict[str, dict[str, Any]]) -> list[str]:
    detailed = {name: row["details"] for name, row in rows.items() if row.get("details") and row["state"] == "passed"}
    lines = ["## Details", ""] if detailed else []
    for name, details in detailed.items():
        lines += [f"### `{name}`", "", "```", *details, "```", ""]
    return lines


def _not_run(rows: dict[str, dict[str, Any]], others: list[str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, row in rows.items():
        if row["state"] in NOT_RUN:
            reasons.setdefault(row["figure"], []).append(name)
    if others:
        reasons["not selected"] = others
    lines = ["## Not run", ""] if reasons else []
    for reason, names in reasons.items():
        lines.append(f"- {reason}: {', '.join(_in_groups(names, [*rows, *others]))}")
    return lines


def _in_groups(names: list[str], every: list[str]) -> list[str]:
    """Return names in code font; one pattern for all checks with the same beginning, if none of them was run."""
    texts = []
    for group, members in groupby(names, key=lambda name: name.partition("/")[0]):
        listed = list(members)
        is_whole = len(listed) > 2 and len(listed) == sum(name.partition("/")[0] == group for name in every)
        texts += [f"`{group}/*` ({len(listed)})"] if is_whole else [f"`{name}`" for name in listed]
    return texts


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.1f} minutes"
