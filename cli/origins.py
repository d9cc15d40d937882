"""Say behind each value of a printed configuration where it came from."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

__all__ = ["with_origins"]

Key = tuple[str | int, ...]
"""The keys of a value from the outside in, with the index in a list, and without ``init_args``."""


@dataclass(frozen=True)
class _Given:
    """Hold a value that a file or an option gives."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}, {' '.join(self.text.split())}" if "${" in self.text else self.place


def with_origins(text: str, arguments: Sequence[str]) -> str:
    """Return a configuration with a comment behind each value.

    The comment is ``FILE:LINE``, ``--OPTION`` or ``default``, with the interpolation that a value was computed from.

    Args:
        text: The resolved configuration as YAML.
        arguments: The command line after the command, whose files and options have given the values.
    """
    given = _given(arguments)
    lines = text.splitlines()
    for key, node in _values(yaml.compose(text)):
        lines[node.end_mark.line] += f"  # {_origin(key, node, given)}"
    return "\n".join(lines) + "\n"


def _origin(key: Key, node: yaml.Node, given: dict[Key, _Given]) -> str:
    found = given.get(key)
    if found is None and key[-1] == "class_path":
        # A class can be given by its name alone, also as the only one of a list.
        found = given.get(key[:-1]) or (given.get(key[:-2]) if 0 in key[-2:] else None)
    # Arguments of a class that another one has replaced do not count.
    is_reset = found is not None and _is_null(node.value) and not _is_null(found.text) and "${" not in found.text
    return "default" if found is None or is_reset else str(found)


def _is_null(text: object) -> bool:
    return text in ("null", "~", "", "Null", "NULL")


def _given(arguments: Sequence[str]) -> dict[Key, _Given]:
    """Return what files and options give, of which later ones override earlier ones."""
    given: dict[Key, _Given] = {}
    for word, following in pairwise([*arguments, ""]):
        if word == "--":
            break
        found = re.match(r"(?:--|(?=-c))([^=\s]+?)(\+?)(?:=(.*))?$", word, re.DOTALL)
        if found is None:
            continue
        name, adds, value = found[1], bool(found[2]), following if found[3] is None else found[3]
        if name.startswith("-c"):
            name, value = "config", value if len(name) == 2 else name[2:]
        if name == "config":
            _add_file(given, (), value)
        else:
            place = f"--{name}{'+' * adds}"
            key = _key_in_list(tuple(name.split(".")), given)
            is_flow = value.lstrip().startswith(("{", "["))
            node = yaml.compose(value) if is_flow else yaml.ScalarNode("tag:yaml.org,2002:str", value)
            _add(given, key, node, place, adds=adds, numbers_lines=False)
    return given


def _add_file(given: dict[Key, _Given], key: Key, value: str) -> None:
    """Add the content of a file below ``key``; ``value`` may also be the content itself."""
    try:
        is_file = Path(value).expanduser().is_file()
        node = yaml.compose(Path(value).expanduser().read_text() if is_file else value)
    except (OSError, yaml.YAMLError):
        return
    if isinstance(node, yaml.MappingNode):
        _add(given, key, node, os.path.relpath(value) if is_file else "--config", adds=False, numbers_lines=is_file)


def _add(given: dict[Key, _Given], key: Key, node: yaml.Node, place: str, *, adds: bool, numbers_lines: bool) -> None:
    """Add the values in a node of YAML.

    Args:
        given: The values that earlier files and options have given; those of the node are added to it.
        key: Key of the node.
        node: A mapping, a list or one value.
        place: The file or option that has the node.
        adds: Whether the value is appended to the list at ``key``, and does not replace it.
        numbers_lines: Whether the line in ``place`` is part of the origin.
    """
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            parts = () if name.value in ("<<", "init_args") else tuple(name.value.removesuffix("+").split("."))
            below = (*key, *(part for part in parts if part != "init_args"))
            _add(given, below, value, place, adds=name.value.endswith("+"), numbers_lines=numbers_lines)
        return
    start = _length(given, key) if adds else 0
    if not adds:
        for old in [old for old in given if _index(old, key) is not None]:
            del given[old]
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _add(given, (*key, start + index), value, place, adds=False, numbers_lines=numbers_lines)
    elif node.value.endswith((".yaml", ".yml", ".json")) and Path(node.value).is_file():
        _add_file(given, key, node.value)
    else:
        # A class can be given by its class_path, or by its name in the place of all of it.
        given.pop((*key, "class_path") if key[-1] != "class_path" else key[:-1], None)
        line = f":{node.start_mark.line + 1}" if numbers_lines else ""
        given[(*key, start) if adds else key] = _Given(place + line, node.value)


def _length(given: dict[Key, _Given], key: Key) -> int:
    """Return the number of values that have been given for the list at ``key``."""
    indices = (index for below in given if (index := _index(below, key)) is not None)
    return 1 + max(indices, default=-1)


def _index(below: Key, key: Key) -> int | None:
    """Return the index in the list at ``key`` of a value that is in this list, else None."""
    is_below = len(below) > len(key) and below[: len(key)] == key
    index = below[len(key)] if is_below else None
    return index if isinstance(index, int) else None


def _key_in_list(parts: tuple[str, ...], given: dict[Key, _Given]) -> Key:
    """Return the key of an option; an argument of a class in a list is that of the last class in the list."""
    key: Key = ()
    for part in parts:
        length = _length(given, key) if key else 0
        if length:
            key = (*key, length - 1)
        if part != "init_args":
            key = (*key, part)
    return key


def _values(node: yaml.Node, key: Key = ()) -> Iterator[tuple[Key, yaml.Node]]:
    """Yield the values of a configuration with their keys: scalars, and empty collections."""
    if isinstance(node, yaml.MappingNode) and node.value:
        for name, value in node.value:
            yield from _values(value, key if name.value == "init_args" and value.value else (*key, name.value))
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for index, value in enumerate(node.value):
            yield from _values(value, (*key, index))
    else:
        yield key, node
