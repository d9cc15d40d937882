"""Check the names of options on the command line and in configuration files.

Nothing here needs the classes that the options belong to: a set of names is enough, so that a misspelt name can be
answered before Lightning is imported.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lightning_dist.cli.errors import closest

NO_MODEL = "no model: give --model=my_module.MyModel, or model.class_path in a YAML file and -c FILE."


def find_mistake(arguments: Sequence[str], names: Collection[str], prog: str) -> str | None:
    """Return the message about a name that no parser could accept, or about a file or a model that is missing.

    Arguments of the user's classes are left to the parser, which knows the classes, and so is everything else that only
    it can judge. A mistake that is found here gets the same message from the parser.

    Args:
        arguments: Words of the command line after the command.
        names: Long options of the command, without dashes.
        prog: The program and the command, such as ``lightning-dist fit``.
    """
    if arguments and not arguments[0].startswith("-"):
        return unrecognized(arguments[:1], names, prog)
    groups = {name.rpartition(".")[0] for name in names if not name.endswith(".help")}
    for path in config_files(arguments):
        try:
            if _is_missing(path):
                return missing_file(path)
            content = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError):
            return None
        # The parser, too, checks the deepest keys first.
        for key in sorted(_leaves(content), key=lambda key: -key.count(".")):
            if not _may_be_known(key, names, groups):
                return unknown_key(key, names, prog, arguments)
    for word in arguments:
        if word == "--":
            break
        found = re.match(r"--([^=\s]+)(=|$)", word)
        if found and not _may_be_known(found[1], names, groups):
            return unrecognized([word], names, prog)
    may_name_a_model = ("-c", "--config", "--model", "--print_config")
    if not any(word.startswith(may_name_a_model) or ".help" in word for word in arguments):
        return NO_MODEL
    return None


def _may_be_known(key: str, names: Collection[str], groups: Collection[str]) -> bool:
    """Return whether ``key`` is an option, or is below one that is no group, and so may be an argument of a class."""
    key = key.removesuffix("+")
    parts = key.split(".")
    above = (".".join(parts[:end]) for end in range(1, len(parts)))
    return key in names or any(prefix in names and prefix not in groups for prefix in above)


def _leaves(content: Any, prefix: str = "") -> Iterator[str]:
    """Yield the full names of the values in a configuration, such as ``trainer.max_steps``."""
    for name, value in content.items() if isinstance(content, dict) else ():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        else:
            yield key


def _is_missing(path: Path) -> bool:
    """Return whether the argument of ``-c`` can only be the path of a local file, which does not exist."""
    text = str(path)
    is_local = ":/" not in text and not text.startswith("~")
    return is_local and not path.exists() and isinstance(yaml.safe_load(text), str)


def unrecognized(words: Sequence[str], names: Collection[str], prog: str) -> str:
    """Return the message about words of the command line that are no option of the command ``prog``."""
    option = next((word for word in words if word.startswith("-")), None)
    if option is None:
        return f"unexpected argument {words[0]!r}: options are written --name=value."
    name = option.lstrip("-").partition("=")[0]
    return f"no option is named --{name}{_nearest_key(name, names, prog, '--')}"


def unknown_key(key: str, names: Collection[str], prog: str, arguments: Sequence[str]) -> str:
    """Return the message about a key of a configuration that is no option of the command ``prog``."""
    return f"{origin(key, arguments)}no option is named {key!r}{_nearest_key(key, names, prog)}"


def _nearest_key(key: str, names: Collection[str], prog: str, dashes: str = "") -> str:
    # The key may also name a section of a file, with options below it.
    known = {*names, *(".".join(name.split(".")[: key.count(".") + 1]) for name in names)}
    answer = closest(key, known)
    while answer == "." and "." in key:
        # The section, not the option, may be misspelled.
        key = key.rpartition(".")[0]
        answer = "." if key in known else closest(key, known)
    if answer == ".":
        return f": {prog} --help lists the options."
    return answer.replace("'", f"'{dashes}", 1)


def missing_file(path: Path) -> str:
    """Return the message about a configuration file that does not exist."""
    shown = os.path.relpath(path)
    siblings = [name.name for name in path.parent.iterdir()] if path.parent.is_dir() else []
    return f"--config: there is no file {shown!r}{closest(path.name, siblings)}"


def origin(key: str, arguments: Sequence[str]) -> str:
    """Return ``"FILE: "`` if a file and no flag sets the key, else an empty string."""
    # A flag may be written as in a file: --model.init_args.dim=3.
    if any(argument.partition("=")[0].replace(".init_args", "").startswith(f"--{key}") for argument in arguments):
        return ""
    for path in reversed(list(config_files(arguments))):
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError):
            continue
        if _holds(content, key.split(".")):
            return f"{path}: "
    return ""


def _holds(content: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if isinstance(content, dict) and key not in content and "init_args" in content:
            content = content["init_args"]
        if not isinstance(content, dict) or key not in content:
            return False
        content = content[key]
    return True


def config_files(arguments: Sequence[str]) -> Iterator[Path]:
    """Yield the configuration files that are named on the command line, in their order."""
    for option, following in pairwise([*arguments, ""]):
        if option in ("-c", "--config"):
            yield Path(following)
        elif found := re.match(r"--config=(.+)|-c=?(.+)", option):
            yield Path(found[1] or found[2])
