"""Run ``lightning-dist checkpoint``, which lists, checks and converts checkpoints without a Trainer."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dist.cli.arguments import ArgumentParser
from lightning_dist.cli.errors import BAD_CONFIGURATION, closest, print_error

if TYPE_CHECKING:  # It imports torch.
    from lightning_dist.checkpoint.manifest import Manifest

DAMAGED = 1

_ACTIONS = ("consolidate", "convert", "ls", "verify")
_OUTPUT_FORMATS = (".ckpt", ".safetensors")


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-dist checkpoint``.

    Args:
        arguments: Words of the command line after ``checkpoint``: an action and its arguments.

    Returns:
        The exit code: 0 for success, 1 if a checkpoint is damaged, 2 if the input cannot be used.
    """
    parser = make_parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _ACTIONS:
        parser.error(f"no action is named {arguments[0]!r}{closest(arguments[0], _ACTIONS)}")
    options = parser.parse_args(arguments)
    if options.action is None:
        parser.error("expected an action: " + ", ".join(_ACTIONS))
    if options.action == "ls":
        return _list(options.folder)
    if options.action == "verify":
        return _verify(options.paths)
    if options.action == "convert":
        return _convert(options)
    if "://" in options.destination:
        parser.error(f"OUT={options.destination!r} must be a local file. Copy it to the store afterwards.")
    options.destination = Path(options.destination)
    if options.destination.suffix not in _OUTPUT_FORMATS:
        parser.error(f"OUT={str(options.destination)!r} must end in {' or '.join(_OUTPUT_FORMATS)}.")
    return _consolidate(options.source, options.destination, options.trust)


def make_parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = ArgumentParser(prog="lightning-dist checkpoint", description="Work with checkpoints.", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=ArgumentParser)
    consolidate = actions.add_parser(
        "consolidate",
        help="write a sharded checkpoint as one file",
        description="Write a sharded checkpoint as one file: .ckpt for load_from_checkpoint, .safetensors for the "
        "weights alone.",
    )
    consolidate.add_argument("source", metavar="DIR", help="path or URL of a sharded checkpoint")
    consolidate.add_argument("destination", metavar="OUT", help="file to write: .ckpt or .safetensors")
    consolidate.add_argument(
        "--trust", action="store_true", help="load objects of any class, which can run any code; only for trusted files"
    )
    converting = actions.add_parser(
        "convert",
        help="convert weights or whole checkpoints between formats",
        description="Convert weights or a whole checkpoint to another format, in little memory, and compare what was "
        "written bit by bit.",
    )
    converting.add_argument("source", metavar="PATH", help="checkpoint of any of the formats")
    converting.add_argument("destination", metavar="OUT", help="path of the new checkpoint")
    converting.add_argument(
        "--to",
        metavar="FORMAT",
        help="lightning-dist, dcp, lightning, safetensors or huggingface; by default, as OUT ends (.ckpt: lightning)",
    )
    converting.add_argument(
        "--prefix",
        default="model.",
        help="what names in a LightningModule have before those of its Hugging Face model (default: model.)",
    )
    converting.add_argument(
        "--config", metavar="PATH", help="config.json, or a folder with one, to write a folder of a Hugging Face model"
    )
    converting.add_argument(
        "--trust", action="store_true", help="load objects of any class, which can run any code; only for trusted files"
    )
    listing = actions.add_parser("ls", help="list checkpoints", description="List checkpoints, also below DIR.")
    listing.add_argument("folder", metavar="DIR", help="path or URL of a folder of checkpoints")
    verifying = actions.add_parser(
        "verify",
        help="check that checkpoints are whole",
        description="Read checkpoints and compare every file with the size and digest that it was written with.",
    )
    verifying.add_argument("paths", metavar="PATH", nargs="+", help="paths or URLs of sharded checkpoints")
    return parser


def _consolidate(source: str, destination: Path, trust: bool) -> int:
    from lightning_dist.checkpoint import CheckpointError, consolidate

    try:
        consolidate(source, destination, trust)
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        print_error(str(error))
        return BAD_CONFIGURATION
    print(f"{destination} ({destination.stat().st_size:,} bytes)")
    return 0


def _convert(options: Namespace) -> int:
    from lightning_dist.checkpoint import CheckpointError
    from lightning_dist.run.convert import Options, convert

    config = None if options.config is None else Path(options.config)
    try:
        done = convert(options.source, options.destination, options.to, Options(options.prefix, config, options.trust))
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        print_error(str(error))
        return BAD_CONFIGURATION
    print(
        f"{options.destination} ({done.written}): {done.num_tensors:,} tensors, {done.num_bytes / 2**20:,.1f} MiB, the"
        f" same bit by bit as in {options.source} ({done.read})."
    )
    if done.left_out:
        print(f"It does not have {', '.join(done.left_out[:5])}{', ...' if len(done.left_out) > 5 else ''}.")
    return 0


def _list(folder: str) -> int:
    from lightning_dist.checkpoint import CheckpointError, find

    try:
        found = find(folder, recurse=True)
    except (CheckpointError, ValueError, OSError, ImportError) as error:
        print_error(str(error))
        return BAD_CONFIGURATION
    if not found:
        print_error(f"{folder} has no sharded checkpoints in it or below.")
        return BAD_CONFIGURATION
    whole = {path: manifest for path, manifest in found if not isinstance(manifest, CheckpointError)}
    for line in _table({path: _described(manifest) for path, manifest in whole.items()}):
        print(line)
    for path, manifest in found:
        if isinstance(manifest, CheckpointError):
            print(f"{path}  damaged: {manifest}")
    return 0


def _described(manifest: "Manifest") -> dict[str, str]:
    """Return what the list says about a checkpoint, by the name of the column."""
    saved = datetime.fromtimestamp(manifest.saved_at).isoformat(" ", "seconds")
    about = {key: str(value) for key, value in manifest.about.items() if key not in _HIDDEN}
    return {"saved": saved, **about, "MiB": f"{manifest.num_bytes / 2**20:,.1f}", "ranks": str(manifest.world_size)}


_HIDDEN = ("mlflow_training", "settings")
"""What a manifest says for programs: an identifier that MLflow does not show, and how the run trained."""


def _table(rows: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of a table with a header, whose columns are aligned.

    Args:
        rows: For each path, which is in the first column, the texts of the other columns by their names.
    """
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [["checkpoint", *columns]]
    cells += [[path, *(row.get(column, "") for column in columns)] for path, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells if rows else ():
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _verify(paths: Sequence[str]) -> int:
    from lightning_dist.checkpoint import CheckpointError, CheckpointNotFoundError, verify

    exit_code = 0
    for path in paths:
        try:
            manifest = verify(path)
            print(f"{path}  good: {len(manifest.files)} files, {manifest.num_bytes / 2**20:,.1f} MiB")
        except (
            CheckpointNotFoundError,
            ValueError,
            ImportError,
        ) as error:  # The URL may also be of an unknown kind.
            print_error(str(error))
            return BAD_CONFIGURATION
        except (CheckpointError, OSError) as error:
            print_error(str(error))
            exit_code = DAMAGED
    return exit_code
