"""Print the findings in the terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_dist.run.doctor.finding import Finding

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print a row for each finding, with what to do below what was seen, and how many there are of each kind.

    Args:
        findings: The findings, in the order of the rows.
        console: The terminal that the table is printed to.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.seen)
        if finding.advice:
            text.append(f"\n-> {finding.advice}", "bold" if finding.status in ("warn", "fail") else "dim")
        table.add_row(Text(finding.status, _COLOURS[finding.status]), Text(finding.name), text)
    console.print(table)
    numbers = Counter(finding.status for finding in findings)
    console.print()
    console.print(
        f"{numbers['pass']} passed, {numbers['warn']} warned, {numbers['fail']} failed, {numbers['skip']} not measured",
        highlight=False,
    )
