"""Refuse arguments that a strategy does not have, by the names that the user knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

__all__ = ["refuse_unknown_arguments"]

Init = TypeVar("Init", bound=Callable[..., None])


def refuse_unknown_arguments(init: Init) -> Init:
    """Decorate the constructor that gets the arguments which the constructors of subclasses pass on.

    Without it, Python's error would name this base class, which the user has not written, and suggest nothing.

    Raises:
        TypeError: By the decorated constructor, if an argument is neither its own nor one of a subclass.
    """
    own = inspect.signature(init).parameters

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - own.keys():
            known = sorted({*own, *_arguments_below(checked, type(self))} - {"self", "args", "kwargs"})
            nearest = get_close_matches(name, known, n=1, cutoff=0.6)
            fix = f"did you mean {nearest[0]!r}?" if nearest else f"its arguments are {', '.join(known)}."
            raise TypeError(f"{type(self).__name__} has no argument {name!r}; {fix}")
        init(self, *args, **kwargs)

    return cast(Init, checked)


def _arguments_below(init: Callable[..., None], kind: type) -> Iterator[str]:
    """Yield the names of the arguments of ``kind`` and its bases, down to the class with the constructor ``init``."""
    for base in kind.__mro__:
        found = vars(base).get("__init__")
        if found is init:
            return
        if inspect.isfunction(found):
            yield from inspect.signature(found).parameters
