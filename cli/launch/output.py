"""Print what other processes write to files."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO


def print_new(path: Path, begin: int, stream: TextIO) -> int:
    """Print what a file has from a position on, and return the position of its end; it need not exist yet.

    Args:
        path: The file, to which another process writes.
        begin: The position, in bytes.
        stream: The stream that it is printed to.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            new = file.read()
    except FileNotFoundError:
        return begin
    if new:
        stream.write(new.decode(errors="replace"))
        stream.flush()
    return begin + len(new)
