"""Answer a request for help and a misspelt option before Lightning is imported, which takes seconds."""

import os
from collections.abc import Sequence

from lightning_dist.cli.errors import BAD_CONFIGURATION, SHOW_TRACEBACK, report
from lightning_dist.cli.help import all_options, common_options
from lightning_dist.cli.keys import find_mistake
from lightning_dist.cli.options import stored


def answer(command: str, arguments: Sequence[str]) -> int | None:
    """Print the help of a command that trains, or what is wrong with its options.

    Args:
        command: Name of the command.
        arguments: Words of the command line after it.

    Returns:
        The exit code, or None if the command has to run.
    """
    description = stored(command)
    for flags, show in (({"-h", "--help"}, common_options), ({"--help-all"}, all_options)):
        if flags & set(arguments):
            if description is None:
                from lightning_dist.cli.describe import describe

                description = describe(command)
            print(show(description), end="")
            return 0
    if description is None or os.environ.get(SHOW_TRACEBACK):
        return None
    mistake = find_mistake(arguments, description.names, f"lightning-dist {command}")
    return None if mistake is None else report(mistake, BAD_CONFIGURATION)
