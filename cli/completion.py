"""Complete the command line in a shell, by argcomplete.

The shell runs the command with an environment variable each time that its user presses the tab key, so nothing slow is
imported. It learns to do so by ``eval "$(register-python-argcomplete lightning-dist)"``.
"""

import argparse
from collections.abc import Mapping

import argcomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from lightning_dist.cli import checkpoint, sync
from lightning_dist.cli.compare import command as compare
from lightning_dist.cli.doctor import command as doctor
from lightning_dist.cli.launch import command as launch
from lightning_dist.cli.new import command as new
from lightning_dist.cli.options import DESCRIBED, Command, read

_FILES = {
    "config": FilesCompleter(("yaml", "yml", "json")),
    "ckpt_path": FilesCompleter(),
    "output": DirectoriesCompleter(),
    "trainer.default_root_dir": DirectoriesCompleter(),
}


def complete(commands: Mapping[str, str]) -> None:
    """Print the completions of the line that the shell has given, and exit.

    Args:
        commands: The commands with what they do.
    """
    parser = argparse.ArgumentParser(prog="lightning-dist")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    subparsers = parser.add_subparsers()
    others = {
        "new": new.make_parser,
        "launch": launch.make_parser,
        "doctor": doctor.make_parser,
        "compare": compare.make_parser,
        "sync": sync.make_parser,
        "checkpoint": checkpoint.make_parser,
    }
    for name, text in commands.items():
        if name in DESCRIBED:
            _add_options(subparsers.add_parser(name, help=text), read(name))
        else:
            subparsers.add_parser(name, help=text, parents=[others[name]()], add_help=False)
    argcomplete.autocomplete(parser, always_complete_options="long")


def _add_options(parser: argparse.ArgumentParser, command: Command) -> None:
    choices = {"trainer.strategy": ("auto", *command.strategies), "trainer.accelerator": ("auto", "cpu", "gpu")}
    choices["trainer.strategy.help"] = tuple(command.strategies)
    for option in command.options:
        if option.name == "help":
            continue
        # Only the first sentence fits beside an option.
        text = option.help.partition(". ")[0].replace("%", "%%")
        if option.type:
            action = parser.add_argument(
                *option.flags, help=text, choices=choices.get(option.name, option.choices) or None
            )
            action.completer = _FILES.get(option.name)  # type: ignore[attr-defined]
        else:
            parser.add_argument(*option.flags, help=text, action="store_true")
    parser.add_argument("--help-all", help="show all options, and exit", action="store_true")
