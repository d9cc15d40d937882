"""Find the code blocks of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.launched import ROOT

__all__ = ["Block", "find_blocks", "pages"]

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Hold a fenced block of a page.

    Args:
        page: Path of the page in the repository.
        line: Number of the block's first line.
        language: The word behind the fence.
        text: Content of the block.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the paths of all pages for users and developers, besides the tutorials, which ``make docs-run`` runs."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "examples/README.md",
        *sorted(path for path in ROOT.glob("docs/**/*.md") if path.parent.name != "tutorials"),
    ]


def find_blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages; with ``languages``, only those in one of them."""
    found = []
    for path in pages():
        text = path.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            found.append(Block(str(path.relative_to(ROOT)), line, match.group(1), match.group(2)))
    return [block for block in found if not languages or block.language in languages]
