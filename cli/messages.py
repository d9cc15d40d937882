"""Shorten jsonargparse's error messages to the key, the value, what was expected, and the nearest name.

For a union, jsonargparse reports a tree, with the reason why the value does not fit for each of the types. Only the
branch of the type that the user meant is kept.
"""

import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from omegaconf.errors import OmegaConfBaseException

from lightning_dist.cli._compat import class_names, literals, option_names, parameters_of, type_of
from lightning_dist.cli.errors import closest
from lightning_dist.cli.keys import NO_MODEL, config_files, missing_file, origin, unknown_key, unrecognized

_MAX_LINES = 3


def shorten(message: str, parser: ArgumentParser, arguments: Sequence[str]) -> str:
    """Rewrite an error of the parser for the user of the command.

    Args:
        message: The message that jsonargparse would print below the usage.
        parser: The parser that raised the error.
        arguments: The command line, which shows which configuration file has the option.

    Returns:
        A message of at most three lines, without the usage. A message of an unknown form is cut to three lines.
    """
    if found := re.match(r"unrecognized arguments: (.*)", message, re.DOTALL):
        return unrecognized(found[1].split(), option_names(parser), _prog(parser))
    if found := re.match(r"Subcommand '\w+' does not accept option '(.+)'", message):
        return unknown_key(found[1], option_names(parser), _prog(parser), arguments)
    if found := re.match(r"the following arguments are required: (.*)", message):
        return _missing(found[1], parser)
    if found := re.match(r"""Parser key "config": File does not exist: '(.*)'""", message):
        return missing_file(Path(found[1]))
    if found := re.match(r"argument (--[\w.]+): expected one argument", message):
        return f"{found[1]} needs a value: {found[1]}=VALUE."
    if found := re.match(r"Problems parsing config: (.*)", message, re.DOTALL):
        return _unreadable_config(arguments) or f"a configuration is not valid YAML: {_one_line(found[1])}"
    if found := re.match(r'Parser key "([\w.]+)"', message):
        return _explain(message.splitlines()[1:] or [message], found[1], parser, arguments)
    return _cut(message)


def _prog(parser: ArgumentParser) -> str:
    return parser.prog.replace(" [options]", "")


def _missing(names: str, parser: ArgumentParser) -> str:
    missing = [re.sub(r"^(fit|validate|test|predict|check)\.", "", name.strip()) for name in names.split(",")]
    if missing == ["model"]:
        return NO_MODEL
    return f"required, but not given: {', '.join(missing)}"


def _explain(lines: list[str], key: str, parser: ArgumentParser, arguments: Sequence[str], path: str = "") -> str:
    """Return the message of that branch of a tree of errors that is about the type which the user meant.

    Args:
        lines: Lines of the tree below a key.
        key: The key in the parser, such as ``model``.
        parser: The parser that raised the error.
        arguments: The command line, which shows which configuration file has the key.
        path: Import path of the class whose arguments the tree is about; empty until a branch has named one.

    Returns:
        The message for this branch.
    """
    branch = _branch(lines, r"- Problem with given class_path '(.+)':")
    if branch is not None:
        return _explain(branch[1], key, parser, arguments, path=branch[0])
    text = "\n".join(lines)
    where = f"{origin(key, arguments)}{key}: "
    if found := re.search(r"(no strategy is named .*|the strategy '.*|\S+ is not a Strategy\.)", text):
        return where + found[1].strip()
    for word in re.findall(r"'([\w-]+)(?:\.[\w.]+)?'", text):  # These are keys or options.
        if word != "init_args" and get_close_matches(word, ["init_args"], cutoff=0.8):
            return f"{where}no key is named {word!r} beside class_path; did you mean 'init_args'?"
    if found := re.search(r"Option '(.+)' is not accepted", text):
        name = path.rpartition(".")[2] or key
        return f"{where}{name} has no argument {found[1]!r}{_nearest_parameter(found[1], path)}"
    if found := re.search(r"the following arguments are required: (.*)", text):
        return f"{where}{path.rpartition('.')[2]} needs {found[1]}: set --{key}.{found[1].split(',')[0]}=VALUE."
    branch = _branch(lines, r'Parser key "([\w.]+)":?')
    if branch is not None:
        return _explain(branch[1], f"{key}.{branch[0]}", parser, arguments)
    if found := re.search(r"module '(.+)' has no attribute '(.+)'", text):
        return f"{where}module {found[1]!r} has no {found[2]!r}{closest(found[2], _names_in(found[1]))}"
    if found := re.search(r"No module named '(.+)'", text):
        return where + _no_module(found[1], path)
    if found := re.search(r"Import path does not correspond to a subclass of (\w+)", text):
        given = re.search(r"Given value: (.*)", text)
        return f"{where}{given[1] if given else path} is not a {found[1]}."
    names = class_names(type_of(parser, key))
    if (found := re.search(r"Expected a dot import path string: (.*)", text)) and names:
        hint = closest(found[1], names | set(literals(type_of(parser, key))))
        hint = "; write the full name, such as my_module.MyClass." if hint == "." else hint
        return f"{where}no known class is named {found[1]!r}{hint}"
    return where + _value_error(text, type_of(parser, key))


def _branch(lines: list[str], head: str) -> tuple[str, list[str]] | None:
    """Return the name in the first heading that matches, and the lines indented below it; None if none matches."""
    for index, line in enumerate(lines):
        found = re.fullmatch(rf"(\s*){head}(.*)", line)
        if found:
            rest = [found[3].strip(), *takewhile(_below(len(found[1])), lines[index + 1 :])]
            return found[2], [line for line in rest if line.strip()]
    return None


def _below(indent: int) -> Callable[[str], bool]:
    return lambda line: not line.strip() or len(line) - len(line.lstrip()) > indent


def _value_error(text: str, typehint: Any) -> str:
    """Explain why a value fits none of the types."""
    given = re.search(r"Given value: (.*)", text) or re.search(r"Got value: (.*)", text)
    if given is None:
        return _cut(text)
    if reason := re.search(r"^\s*- (?!Expected an? |Does not validate)(.+)", text, re.MULTILINE):
        return f"{given[1]}: {reason[1]}"
    # The type is not known for the arguments of a class that the user has chosen, but the message names its choices.
    named = re.search(r"Expected a (?:typing\.)?Literal\[([^\]]*)\]", text)
    choices = list(dict.fromkeys(literals(typehint) or (re.findall(r"'([^']*)'", named[1]) if named else [])))
    if choices:
        return f"{given[1]!r} is none of {', '.join(choices)}{closest(given[1], choices)}"
    single = r"Expected an? (<class '[\w.]+'>|[\w.\[\], ]+)"
    expected = re.search(r"Subtypes: \[(.*)\]", text) or re.search(single, text)
    names = re.split(r", (?![^\[]*\])", expected[1]) if expected else ["something else"]
    return f"expected {' or '.join(dict.fromkeys(map(_type_name, names)))}, got {given[1]!r}."


def _type_name(text: str) -> str:
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).removeprefix("typing.").strip(" .")
    return "null" if name == "NoneType" else name


def _nearest_parameter(name: str, path: str) -> str:
    try:
        return closest(name, parameters_of(path))
    except (ImportError, AttributeError, ValueError):
        return "."


def _names_in(module: str) -> list[str]:
    imported = importlib.import_module(module)
    classes = [name for name, value in vars(imported).items() if inspect.isclass(value)]
    return [*classes, *(found.name for found in pkgutil.iter_modules(getattr(imported, "__path__", [])))]


def _no_module(module: str, path: str) -> str:
    if path != module and not path.startswith(f"{module}."):
        return f"importing {path} fails: there is no module {module!r}."
    package, _, name = module.rpartition(".")
    try:
        places = list(importlib.import_module(package).__path__) if package else [os.getcwd()]
    except (ImportError, AttributeError):
        return f"there is no module {module!r}."
    siblings = [found.name for found in pkgutil.iter_modules(places)]
    nearest = closest(name, siblings)
    if not package and nearest == ".":
        nearest = ", neither in the working directory nor installed."
    return f"there is no module {module!r}{nearest}"


def _unreadable_config(arguments: Sequence[str]) -> str:
    for path in config_files(arguments):
        try:
            yaml.safe_load(path.read_text())
        except OSError:
            continue
        except yaml.MarkedYAMLError as error:
            place = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            return f"{path}{place} is not valid YAML: {error.problem or _one_line(str(error))}."
    return ""


def interpolation(error: OmegaConfBaseException) -> str:
    """Explain why the ``${...}`` of a configuration cannot be replaced."""
    key = str(error.full_key or "").partition(".")[2]
    reason = str(error).splitlines()[0]
    if found := re.match(r"Interpolation key '\.*(.+)' not found", reason):
        reason = f"there is no {found[1]!r} in the configuration to replace ${{{found[1]}}}."
    return f"{key}: {reason}"


def original(error: Exception) -> Exception:
    """Return the error of a class's constructor that jsonargparse has wrapped in an error about types.

    Args:
        error: The error that the parser raised while it instantiated classes; any other error is returned unchanged.
    """
    while str(error).startswith("Does not validate against any of the Union subtypes"):
        cause = error.__cause__
        if not isinstance(cause, Exception) or str(cause).startswith("Expected a"):
            causes = re.findall(r"^  - (?!Expected a)(.*)", str(error), re.MULTILINE)
            return ValueError(causes[0]).with_traceback(error.__traceback__) if causes else error
        error = cause
    return error


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cut(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return "\n  ".join(lines[:_MAX_LINES])
