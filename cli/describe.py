"""Describe the options of the commands that train, from their parsers.

Run ``python -m lightning_dist.cli.describe`` to write the file that ``options.py`` reads.
"""

import argparse
import json
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_dist.cli._compat import options_of
from lightning_dist.cli.check import CheckCommand
from lightning_dist.cli.failures import Progress
from lightning_dist.cli.options import DESCRIBED, PATH, Command, Option, to_json
from lightning_dist.cli.plan import PlanCommand
from lightning_dist.cli.profile import ProfileCommand
from lightning_dist.cli.trainer import TrainerCommand

_CLASSES: dict[str, type[TrainerCommand]] = {
    "check": CheckCommand,
    "plan": PlanCommand,
    "profile": ProfileCommand,
}
"""Classes of the commands that have one of their own; the others are of the class ``TrainerCommand``."""


class _Parser(Exception):  # noqa: N818 - It is no error.
    """Carry the parser of a command out of its constructor."""


def describe(name: str) -> Command:
    """Return the description of a command.

    Args:
        name: One of ``options.DESCRIBED``.
    """

    class Described(_CLASSES.get(name, TrainerCommand)):  # type: ignore[misc]
        @override
        def parse_arguments(self, parser: ArgumentParser, args: Any) -> NoReturn:
            raise _Parser(parser)

    try:
        Described(Progress(), [name])
    except _Parser as carried:
        options = [_option(action, hint) for action, hint in options_of(carried.args[0], name)]
    ours = {
        key: entry["description"]
        for key, entry in StrategyRegistry.items()
        if entry["strategy"].__module__.startswith("lightning_dist.")
    }
    return Command(name, tuple(options), ours)


def _option(action: argparse.Action, hint: Any) -> Option:
    takes_value = action.nargs != 0
    explains = action.dest.endswith(".help")
    alternatives = () if hint is None else tuple(dict.fromkeys(_alternatives(hint)))
    if explains:
        kind = "CLASS"
    elif alternatives:
        kind = " | ".join(map(_type_text, alternatives))
    else:
        kind = (
            {"config": "FILE", "trainer": "FILE", "print_config": "FLAGS"}.get(action.dest, "") if takes_value else ""
        )
    has_default = takes_value and action.default is not argparse.SUPPRESS and hint is not None
    return Option(
        flags=tuple(flag for flag in action.option_strings if not flag.endswith("+")),
        type=kind,
        default=_as_yaml(action.default) if has_default else "",
        help=_without_markup(action.help or ""),
        choices=() if explains else _choices(alternatives),
    )


def _alternatives(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, of a union inside of it, and the values of literals."""
    if get_origin(hint) in (Union, UnionType):
        for argument in get_args(hint):
            yield from _alternatives(argument)
    elif get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    else:
        yield hint


def _type_text(hint: Any) -> str:
    """Return a type hint in short: the value of a literal, or names without their modules."""
    if isinstance(hint, str):
        return hint
    if hint is NoneType:
        return "null"
    inner = ", ".join(" | ".join(map(_type_text, _alternatives(argument))) for argument in get_args(hint))
    name = str(getattr(hint, "__name__", hint))
    return f"{name}[{inner}]" if inner else name


def _choices(alternatives: tuple[Any, ...]) -> tuple[str, ...]:
    """Return all values, or nothing if a type has more than can be listed."""
    choices: list[str] = []
    for alternative in alternatives:
        if alternative is bool:
            choices += ("true", "false")
        elif isinstance(alternative, str) or alternative is NoneType:
            choices.append(_type_text(alternative))
        else:
            return ()
    return tuple(choices)


def _as_yaml(value: Any) -> str:
    """Return a default as it is written in a configuration, or the name of the class that is the default."""
    if isinstance(value, Namespace):
        return str(value.class_path).rpartition(".")[2]
    return value if isinstance(value, str) else json.dumps(value)


def _without_markup(text: str) -> str:
    """Return the text of a docstring without reStructuredText's markup, and without the default, which is known."""
    text = re.sub(r"\s*Default(:|s to) `+[^`]*`+\.?", "", text)
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<([^`>]+)>`_", r"\1 (\2)", text)
    return " ".join(text.replace("``", "").replace("`", "'").split())


def main() -> None:
    """Write ``options.json``."""
    PATH.write_text(to_json(list(map(describe, DESCRIBED))))


if __name__ == "__main__":
    main()
