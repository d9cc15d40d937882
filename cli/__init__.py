"""Run the ``lightning-dist`` command.

This module imports nothing of the ``cli`` extra, so that it can report which of its packages are missing.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from lightning_dist.cli.errors import BAD_CONFIGURATION, closest, print_error

__all__ = ["main"]

_COMMANDS = {
    "new": "write a small project to begin with",
    "fit": "train a model",
    "validate": "run one validation epoch",
    "test": "run one test epoch",
    "predict": "run a model over data and collect what it returns",
    "launch": "start a run on all devices of nodes, or as a job of SLURM",
    "check": "compare a step under a strategy with one process, before a training",
    "plan": "predict the memory of each layout, without devices",
    "doctor": "measure the nodes of a run, and find what is wrong with them, before a training",
    "profile": "record some training steps with torch's profiler",
    "compare": "compare runs that MLflow holds",
    "sync": "send MLflow what runs have logged while it was away",
    "checkpoint": "list, check and convert checkpoints",
}
_MODULES = {
    "new": "lightning_dist.cli.new.command",
    "launch": "lightning_dist.cli.launch.command",
    "check": "lightning_dist.cli.check",
    "plan": "lightning_dist.cli.plan",
    "doctor": "lightning_dist.cli.doctor.command",
    "profile": "lightning_dist.cli.profile",
    "compare": "lightning_dist.cli.compare.command",
    "sync": "lightning_dist.cli.sync",
    "checkpoint": "lightning_dist.cli.checkpoint",
}
"""The modules of the commands; of the others, it is ``lightning_dist.cli.trainer``."""

_PACKAGES = {
    "new": (),
    "launch": (),
    "compare": ("mlflow", "rich", "jinja2"),
    "sync": ("mlflow",),
    "checkpoint": (),
    "doctor": ("rich",),
}
"""The packages of the extra ``cli`` that the commands need."""

_PACKAGES_OF_TRAINER = ("jsonargparse", "docstring_parser", "omegaconf", "mlflow", "rich")

_USAGE = """\
usage: lightning-dist COMMAND [options]

Train ordinary LightningModules, spread over devices by a strategy's name.

commands:
{commands}

options:
  -h, --help   show this and exit; after a command, that command's options
  --version    show the version and exit

example:
  lightning-dist fit -c config.yaml --trainer.strategy=hybrid_shard --trainer.strategy.dp_shard_size=4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None: those of this process.

    Returns:
        The exit code: 0 for success, 1 if training failed, 2 for a bad configuration, 75 if the run stopped on request
        and saved a checkpoint. A process that hangs is ended with code 76, so that this function does not return.
    """
    if "_ARGCOMPLETE" in os.environ and find_spec("argcomplete"):
        from lightning_dist.cli.completion import complete

        complete(_COMMANDS)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:<12} {text}" for name, text in _COMMANDS.items())
        print(_USAGE.format(commands=commands), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else BAD_CONFIGURATION
    command = arguments[0]
    if command == "--version":
        from importlib.metadata import version

        print(f"lightning-dist {version('lightning-dist')}")
        return 0
    if command not in _COMMANDS:
        names = ", ".join(_COMMANDS)
        print_error(f"no command is named {command!r}{closest(command, _COMMANDS)} The commands are {names}.")
        return BAD_CONFIGURATION
    missing = [name for name in _PACKAGES.get(command, _PACKAGES_OF_TRAINER) if find_spec(name) is None]
    if missing:
        print_error(f'{command} needs {" and ".join(missing)}: pip install "lightning-dist[cli]"')
        return BAD_CONFIGURATION
    if command not in _PACKAGES:  # It trains, or takes the options of a training.
        from lightning_dist.cli.at_once import answer

        code = answer(command, arguments[1:])
        if code is not None:
            return code
    if command in _MODULES:
        return int(import_module(_MODULES[command]).run(arguments[1:]))
    from lightning_dist.cli.trainer import run

    return run(arguments)
