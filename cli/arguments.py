"""Parse the arguments of commands that do not train."""

import argparse
from typing import Any, NoReturn

from typing_extensions import override

from lightning_dist.cli.errors import BAD_CONFIGURATION, closest, print_error

_UNKNOWN = "unrecognized arguments: "


class ArgumentParser(argparse.ArgumentParser):
    """Report a mistake on the command line in one line, with the nearest known option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options: list[str] = []
        self._actions_by_name: dict[str, ArgumentParser] = {}
        super().__init__(*args, **kwargs)

    @override
    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self._options += action.option_strings
        return action

    @override
    def add_subparsers(self, **kwargs: Any) -> Any:
        subparsers = super().add_subparsers(**kwargs)
        self._actions_by_name = subparsers.choices
        return subparsers

    @override
    def error(self, message: str) -> NoReturn:
        """Print the message to stderr, and exit with the code of a bad configuration."""
        if message.startswith(_UNKNOWN):
            unknown = message.removeprefix(_UNKNOWN).split()[0]
            if unknown.startswith("-"):
                name = unknown.partition("=")[0]
                parsers = (self, *self._actions_by_name.values())
                options = [option for parser in parsers for option in parser._options]
                message = f"no option is named {name}{closest(name, options)}"
            else:
                message = f"unexpected argument {unknown!r}."
        print_error(f"{self.prog}: {message}")
        raise SystemExit(BAD_CONFIGURATION)
