"""Run ``lightning-dist new``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from shutil import copytree, ignore_patterns

from lightning_dist.cli.arguments import ArgumentParser
from lightning_dist.cli.errors import BAD_CONFIGURATION, print_error

_DESCRIPTION = """\
Write a small project: a LightningModule, its data, a configuration, and an overlay for each way of training. It trains
at once, on CPUs as well. Replace the model and the data by your own.
"""
_NEXT = """\
{folder} has these files:
{names}

Go on with:
  cd {folder}
  lightning-dist fit -c base.yaml -c strategies/hybrid_shard.yaml
  lightning-dist fit -c base.yaml -c strategies/ddp.yaml
  lightning-dist compare
"""


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist new``.

    Args:
        arguments: Words of the command line after ``new``.

    Returns:
        0, or 2 if the folder cannot be written.
    """
    folder = Path(make_parser().parse_args(arguments).folder)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            print_error(f"lightning-dist new: the folder {str(folder)!r} is not empty. Give the name of a new one.")
            return BAD_CONFIGURATION
        with as_file(files("lightning_dist.cli.new").joinpath("project")) as project:
            copytree(project, folder, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)
    except OSError as error:
        print_error(f"lightning-dist new: cannot write {str(folder)!r}: {error.strerror or error}")
        return BAD_CONFIGURATION
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    print(_NEXT.format(folder=folder, names="\n".join(f"  {name}" for name in names)), end="")
    return 0


def make_parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = ArgumentParser(
        prog="lightning-dist new", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", help="folder that is written; it must not exist, or be empty")
    return parser
