"""Run ``python -m lightning_dist.run.watchdog_process.explain PATH...`` to explain a hang from the files of all nodes.

The watchdog of a node sees only the ranks of its node. This program reads the flight recorder files of any number of
ranks: ``flight_recorder-rank<rank>.json`` of the watchdog, and the pickled files that torch writes when a collective
of NCCL times out (``TORCH_NCCL_DUMP_ON_TIMEOUT``), whose names end with the rank.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .records import Record, Records

__all__ = ["explain", "main"]


def explain(dumps: Mapping[int, Mapping[str, Any]]) -> str:
    """Return one sentence on the collective that ranks wait in, and on the ranks that did not enter it.

    Args:
        dumps: By global rank, a dump of torch's flight recorder (``_dump_nccl_trace``), or a file of the watchdog.
    """
    # The watchdog's file of a rank that did not answer is empty, and tells nothing.
    told = [rank for rank in sorted(dumps) if any(dumps[rank].get(key) for key in ("entries", "groups", "pg_config"))]
    return Records({rank: Record.from_dump(dumps[rank]) for rank in told}).explain() + "."


class _PlainUnpickler(pickle.Unpickler):
    """Load dictionaries, lists, strings and numbers, of which torch's dumps consist, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds an object of class {module}.{name}, which no flight recorder writes")


def _read(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the rank and the dump in a file.

    Raises:
        ValueError: If the name does not end with a rank, or the file is no dump.
    """
    number = re.search(r"(\d+)$", path.stem if path.suffix == ".json" else path.name)
    if number is None:
        raise ValueError(f"{path}: the name does not end with a rank, as flight_recorder-rank0.json does.")
    content = path.read_bytes()
    try:
        dump = json.loads(content) if content[:1] == b"{" else _PlainUnpickler(io.BytesIO(content)).load()
    except (ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no file of a flight recorder: {error}") from None
    if not isinstance(dump, dict):
        raise ValueError(f"{path} is no file of a flight recorder: it holds no dictionary.")
    return int(number[1]), dump


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the sentence of :func:`explain` on the files and folders that the command line names."""
    parser = argparse.ArgumentParser(description="Explain a hang from the flight recorder files of its ranks.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder of the watchdog's")
    paths: list[Path] = []
    for path in parser.parse_args(arguments).paths:
        found = sorted(path.glob("flight_recorder-rank*.json")) if path.is_dir() else [path]
        if not found:
            parser.error(f"{path} has no flight_recorder-rank<rank>.json: name torch's own files one by one.")
        paths += found
    try:
        print(explain(dict(map(_read, paths))))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
