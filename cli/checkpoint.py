"""``lightning-dist checkpoint``: what can be done to a checkpoint without a Trainer."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightning_dist.cli.errors import BAD_CONFIGURATION, closest, print_error

_OUTPUT_FORMATS = (".ckpt", ".safetensors")


class _Parser(argparse.ArgumentParser):
    """Answers a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        print_error(f"{self.prog}: {message}")
        raise SystemExit(BAD_CONFIGURATION)


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist checkpoint``.

    Args:
        arguments: What follows ``checkpoint``.

    Returns:
        The exit code: 0 done, 2 if the input cannot be used.
    """
    parser = _Parser(prog="lightning-dist checkpoint", description="Work with checkpoints.", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=_Parser)
    consolidate = actions.add_parser(
        "consolidate",
        help="write a sharded checkpoint as one file",
        description="Write a sharded checkpoint as one file: .ckpt for load_from_checkpoint, .safetensors for the "
        "weights alone.",
    )
    consolidate.add_argument("source", metavar="DIR", type=Path, help="folder of a sharded checkpoint")
    consolidate.add_argument("destination", metavar="OUT", type=Path, help="file to write: .ckpt or .safetensors")
    if arguments and not arguments[0].startswith("-") and arguments[0] not in actions.choices:
        parser.error(f"no action is named {arguments[0]!r}{closest(arguments[0], actions.choices)}")
    options = parser.parse_args(arguments)
    if options.action is None:
        parser.error("expected an action: " + ", ".join(actions.choices))
    if options.destination.suffix not in _OUTPUT_FORMATS:
        consolidate.error(f"OUT={str(options.destination)!r} must end in {' or '.join(_OUTPUT_FORMATS)}.")
    return _consolidate(options.source, options.destination)


def _consolidate(source: Path, destination: Path) -> int:
    from lightning_dist.checkpoint import CheckpointError, consolidate

    try:
        consolidate(source, destination)
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        print_error(str(error))
        return BAD_CONFIGURATION
    print(f"{destination} ({destination.stat().st_size:,} bytes)")
    return 0
