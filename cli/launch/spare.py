"""Be ready to run a rank at once (``python -m lightning_dist.cli.launch.spare``).

The process imports what every training imports, which takes seconds. Then it reads one line, a dictionary in JSON with
the rank's ``environment``, ``words`` and the files ``out`` and ``err`` of its output, and becomes this rank. It ends if
there is no such line, because the launcher has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from lightning_dist.cli.launch.rank import end_with_parent, main

_IMPORTS = ("torch.distributed.fsdp", "lightning_dist.cli.trainer", "torchft")


def run() -> int:
    """Import, wait for a rank, run it, and return its exit code."""
    end_with_parent()
    os.environ.setdefault("RUST_LOG", "error")  # Torchft reads it when it is imported.
    for name in _IMPORTS:
        importlib.import_module(name)
    line = sys.stdin.readline()
    if not line:
        return 0
    rank = json.loads(line)
    os.environ.update(rank["environment"])
    for descriptor, path in ((1, rank["out"]), (2, rank["err"])):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    return main(rank["words"])


if __name__ == "__main__":
    sys.exit(run())
