"""Find the commands of a tutorial's page."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Command", "commands"]

# MyST gives a fence a language, which may be a directive in braces. Blocks inside of a list are indented.
_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """Hold a command of a page.

    Args:
        line: Number of its first line in the page.
        text: The command, which may have several lines.
    """

    line: int
    text: str


def commands(page: Path) -> list[Command]:
    """Return the commands in the bash blocks of a page, in their order.

    Raises:
        ValueError: If a block ends within a command.
    """
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        if match[2] == "bash":
            first = text.count("\n", 0, match.start(3)) + 1
            found += _split(page, first, [line.removeprefix(match[1]) for line in match[3].splitlines()])
    return found


def _split(page: Path, first: int, lines: list[str]) -> list[Command]:
    """Split the lines of a block, of which the first one has the number ``first``, into commands."""
    found = []
    start = 0
    for end in range(1, len(lines) + 1):
        text = "\n".join(lines[start:end])
        if not text.strip() or (text.lstrip().startswith("#") and "\n" not in text):
            start = end
        elif _is_complete(text):
            found.append(Command(first + start, text))
            start = end
    if start < len(lines):
        raise ValueError(f"{page}:{first + start}: the block ends within this command:\n" + "\n".join(lines[start:]))
    return found


def _is_complete(text: str) -> bool:
    """Return whether bash would run ``text`` without waiting for a further line."""
    if text.endswith("\\"):
        return False
    checked = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    return checked.returncode == 0 and not checked.stderr  # Bash only warns of a here-document without an end.
