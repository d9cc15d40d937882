"""Run ``lightning-dist sync``, which sends MLflow what runs have logged while it could not be reached."""

from __future__ import annotations

import json
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dist.cli.arguments import ArgumentParser
from lightning_dist.cli.errors import BAD_CONFIGURATION, print_error

if TYPE_CHECKING:
    from lightning_dist.plugins.loggers.leftovers import Synced

NOT_SENT = 1

_DESCRIPTION = """\
Send MLflow what runs have logged while it was away. Each run keeps it in a file whose name ends in .spool.jsonl, in
the folder that its warning names. A file is removed when MLflow has everything. Sending again what MLflow has changes
nothing, and a step that a later process has logged again is not doubled.
"""
_EXAMPLES = """\
examples:
  lightning-dist sync                           what is below mlruns, to the servers that the runs were started with
  lightning-dist sync /scratch/mlruns --json    for a script: {"spools": [{"path": ..., "status": "sent", ...}]}
  lightning-dist sync run/mlflow-spool --tracking-uri http://other:5000

exit codes:
  0  MLflow has everything, or a running process sends it
  1  something could not be sent; it is still in its file
  2  a folder does not exist, or the arguments are wrong
"""


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist sync``.

    Args:
        arguments: Words of the command line after ``sync``.

    Returns:
        The exit code, as ``--help`` lists them.
    """
    options = make_parser().parse_args(arguments)
    for folder in options.folders:
        if not Path(folder).is_dir():
            print_error(
                f"lightning-dist sync: DIR={folder!r} is not a folder. Give the one that the run's warning names."
            )
            return BAD_CONFIGURATION
    # These modules import MLflow and Lightning, without which --help and mistakes are answered at once.
    from lightning_dist.plugins.loggers.leftovers import sync
    from lightning_dist.plugins.loggers.spool import find_spools

    spools = sorted({path.resolve() for folder in options.folders for path in find_spools(Path(folder))})
    results = [sync(path, options.tracking_uri) for path in spools]
    if options.json:
        print(json.dumps({"spools": [asdict(result) for result in results]}))
    else:
        print("\n".join(map(_line, results)) or "There is nothing to send.")
    return NOT_SENT if any(result.status == "failed" for result in results) else 0


def make_parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = ArgumentParser(
        prog="lightning-dist sync",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folders", metavar="DIR", nargs="*", default=["mlruns"], help="folders to search (mlruns)")
    parser.add_argument("--tracking-uri", metavar="URI", help="send to this store, and not to the run's own")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _line(result: Synced) -> str:
    if result.status == "in use":
        return f"{result.path}  in use by a running process, which sends it"
    if result.status == "failed":
        return f"{result.path}  not sent: {' '.join(result.error.split())}"
    refused = f"; MLflow has refused {', '.join(result.refused)}" if result.refused else ""
    return (
        f"{result.path}  sent: {result.num_metrics:,} values of metrics to run {result.run_id} of {result.tracking_uri}"
        f"{refused}"
    )
