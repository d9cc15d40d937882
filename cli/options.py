"""Look up the options of the commands that train, without importing Lightning, whose classes define most of them.

``options.json`` describes the parsers of these commands. ``python -m lightning_dist.cli.describe`` writes it, and a
test compares it with the parsers. With other versions of the packages that define the options it is not used, and the
parsers are asked.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["DESCRIBED", "PACKAGES", "PATH", "Command", "Option", "read", "stored", "to_json"]

PATH = Path(__file__).with_name("options.json")

DESCRIBED = ("fit", "validate", "test", "predict", "profile", "check", "plan")
"""The commands whose options are in the file."""

PACKAGES = ("jsonargparse", "lightning")
"""The packages whose versions determine the options."""


@dataclass(frozen=True)
class Option:
    """Describe an option.

    Args:
        flags: Its spellings on the command line, such as ``-c`` and ``--config``.
        type: The accepted values, as text; empty for an option without a value.
        default: The default value, as YAML; empty if there is none.
        help: What it means, as text without markup.
        choices: All accepted values, if they can be listed.
    """

    flags: tuple[str, ...]
    type: str
    default: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the long spelling without dashes."""
        return self.flags[-1].removeprefix("--")


@dataclass(frozen=True)
class Command:
    """Describe a command.

    Args:
        name: The name of the command, such as ``fit``.
        options: Its options, in the order of its parser.
        strategies: What each strategy of this package does, by its registered name.
    """

    name: str
    options: tuple[Option, ...]
    strategies: Mapping[str, str]

    @property
    def names(self) -> set[str]:
        """Return the long options, without dashes."""
        return {flag.removeprefix("--") for option in self.options for flag in option.flags if flag.startswith("--")}


def stored(name: str) -> Command | None:
    """Return the description of a command, or None if it was made with other versions of the packages.

    Args:
        name: One of :data:`DESCRIBED`.
    """
    return read(name) if _content()["packages"] == _versions() else None


def read(name: str) -> Command:
    """Return the description of a command, although it may have been made with other versions of the packages.

    Args:
        name: One of :data:`DESCRIBED`.
    """
    content = _content()
    entries = [*content["shared"], *content["commands"][name]]
    options = {entry["flags"][-1]: entry for entry in entries}
    return Command(name, tuple(map(_option, options.values())), content["strategies"])


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(PATH.read_text())
    return content


def to_json(commands: list[Command]) -> str:
    """Return the content of the file, in which the options that all commands have are written once.

    Where a command describes such an option otherwise than the first one, it is written again.
    """
    everywhere = set.intersection(*(command.names for command in commands))
    shared = {option.name: option for option in commands[0].options if option.name in everywhere}
    own = {
        command.name: [asdict(option) for option in command.options if option != shared.get(option.name)]
        for command in commands
    }
    content = {
        "packages": _versions(),
        "strategies": commands[0].strategies,
        "shared": list(map(asdict, shared.values())),
        "commands": own,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def _option(entry: dict[str, str]) -> Option:
    lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    return Option(**{**entry, **lists})  # type: ignore[arg-type]
