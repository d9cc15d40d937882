"""Give strategies the arguments of all techniques, and refuse arguments that a strategy does not have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from textwrap import dedent, fill, indent
from typing import Any, get_type_hints

from lightning_dist.mesh.layout import AXES
from lightning_dist.parallelize import OPTIONS

__all__ = ["Argument", "refuse_unknown_arguments", "show_arguments", "written_arguments"]


@dataclass(frozen=True)
class Argument:
    """Describe an argument of a strategy.

    Args:
        parameter: Name, type and default of the argument.
        text: Explanation of the argument, from a docstring.
    """

    parameter: inspect.Parameter
    text: str


def written_arguments(kind: type) -> dict[str, Argument]:
    """Return the arguments that the constructor in the code of ``kind`` names, by their names."""
    init: Any = vars(kind)["__init__"]
    texts, hints = _texts(kind), get_type_hints(init)
    return {
        name: Argument(parameter.replace(annotation=hints.get(name, Any)), texts.get(name, ""))
        for name, parameter in inspect.signature(init).parameters.items()
        if name != "self" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def show_arguments(
    kind: type, own: Mapping[str, Argument], shared: Mapping[str, Argument], offers: Iterable[str]
) -> None:
    """Let the constructor of a strategy show all its arguments in its signature and its docstring.

    jsonargparse reads both, so that YAML and the command line have the arguments of techniques as well.

    Args:
        kind: The class of the strategy.
        own: The arguments that this class names, in addition to those of all strategies.
        shared: The arguments that all strategies name.
        offers: The axes and other features of the strategy, which say which arguments of techniques it has.
    """
    specific: dict[str, Argument] = {}
    general: dict[str, Argument] = {}
    for options in OPTIONS:
        texts, of_all = _texts(options), {parameter.name for parameter in options.parameters(())}
        for parameter in options.parameters(offers):
            found = general if parameter.name in of_all else specific
            found[parameter.name] = Argument(parameter, texts.get(parameter.name, ""))
    if own:  # The constructor passes the shared ones on, by name.
        by_name = inspect.Parameter.KEYWORD_ONLY
        shared = {name: Argument(one.parameter.replace(kind=by_name), one.text) for name, one in shared.items()}
    arguments = {**own, **specific, **shared, **general}
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = sorted((argument.parameter for argument in arguments.values()), key=lambda one: one.kind)
    init: Any = vars(kind)["__init__"]
    init.__signature__ = inspect.Signature([first, *parameters], return_annotation=None)
    entries = [fill(f"{name}: {one.text}", 116, subsequent_indent="    ") for name, one in arguments.items()]
    init.__doc__ = "Create the strategy.\n\nArgs:\n" + indent("\n".join(entries), "    ") + "\n"


def _texts(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say about each of its arguments, by their names."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = re.search(r"\n    Args:\n(.*?)(?=\n    \S|\Z)", vars(base).get("__doc__") or "", re.DOTALL)
        entries = dedent(section[1]) if section else ""
        found = re.findall(r"^(\w+): (.*?)(?=^\w+: |\Z)", entries, re.DOTALL | re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in found}
    return texts


def refuse_unknown_arguments(kind: type, given: Iterable[str], written: Iterable[str], offers: Iterable[str]) -> None:
    """Refuse arguments by the names that the user knows, and suggest the nearest one.

    Args:
        kind: The class of the strategy.
        given: The names of the arguments that no constructor names.
        written: The names of those that constructors name.
        offers: The axes and other features of the strategy.

    Raises:
        TypeError: If no technique that the strategy offers has such an argument.
    """
    of_techniques = {parameter.name for options in OPTIONS for parameter in options.parameters(offers)}
    elsewhere = {one.name: one.metadata.get("only_with") for options in OPTIONS for one in options.fields()}
    for name in given:
        if name in of_techniques:
            continue
        if elsewhere.get(name) in (*(axis.name for axis in AXES), "ep"):
            raise TypeError(
                f"{kind.__name__} has no argument {name!r}, which needs the axis {elsewhere[name]}: nd_parallel has it."
            )
        known = sorted({*of_techniques, *written})
        nearest = get_close_matches(name, known, n=1, cutoff=0.6)
        fix = f"did you mean {nearest[0]!r}?" if nearest else f"its arguments are {', '.join(known)}."
        raise TypeError(f"{kind.__name__} has no argument {name!r}; {fix}")
