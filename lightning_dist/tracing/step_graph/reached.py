"""Find what functions of the user may change outside of the model: objects, variables and containers."""

from __future__ import annotations

import inspect
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from lightning_dist._compat import foreign_hooks
from lightning_dist.tracing.step_graph.contents import packages_of

__all__ = ["containers_of_classes", "functions_of", "reached_by", "reached_outside", "referred"]

MANY_ITEMS = 2**14
"""Number of items from which a container outside of the model is left as it is."""

_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)

_CALLED = ("forward", "training_step", "validation_step", "test_step", "predict_step", "__call__")
"""Names of the methods with which the code of modules begins."""

_DEPTH = 3
"""Number of functions, each called by the one before, whose variables are found."""


def referred(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield what ``function`` refers to itself: the object of a method, cells of variables, defaults, and globals."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        yield from referred(function.func)
    elif isinstance(function, types.MethodType):
        yield function.__self__
        yield from referred(function.__func__)
    elif isinstance(function, types.FunctionType):
        names = function.__code__.co_freevars  # super() refers to the class by a variable.
        yield from (cell for name, cell in zip(names, function.__closure__ or (), strict=True) if name != "__class__")
        yield from function.__defaults__ or ()
        yield from (function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__)
    else:
        yield function


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that a function uses, also in comprehensions and functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def reached_by(function: Callable[..., Any], depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the objects that ``function``, and functions that it calls, can change: those to which they refer."""
    for value in map(_content, referred(function)):
        if isinstance(value, partial | types.MethodType | types.FunctionType):
            if depth:
                yield from reached_by(value, depth - 1)
        elif value is not None and not isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            yield value


def _content(value: Any) -> Any:
    """Return the content of a cell, and None if it has none yet; return other values as they are."""
    if not isinstance(value, types.CellType):
        return value
    try:
        return value.cell_contents
    except ValueError:
        return None


def functions_of(modules: Iterable[nn.Module], packages: Collection[str]) -> list[types.FunctionType]:
    """Return the forwards and steps of the user's classes of ``modules``, and the user's functions that these call.

    Args:
        modules: Some modules.
        packages: The user's packages, from :func:`lightning_dist.tracing.step_graph.contents.packages_of`.
    """
    found: dict[types.FunctionType, None] = {}
    for cls in dict.fromkeys(map(type, modules)):
        seen: dict[types.FunctionType, None] = {}
        pending: list[Any] = [inspect.getattr_static(cls, name, None) for name in _CALLED]
        while pending:
            function = pending.pop()
            if not isinstance(function, types.FunctionType) or function in seen:
                continue
            if function.__module__.partition(".")[0] in packages:
                seen[function] = None
                pending += map(_content, referred(function))  # A decorated function is in a cell.
                pending += (inspect.getattr_static(cls, name, None) for name in _names(function.__code__))
        found |= seen
    return list(found)


def containers_of_classes(modules: Iterable[nn.Module], packages: Collection[str]) -> list[Any]:
    """Return the containers that are attributes of the user's classes of ``modules``."""
    return [
        value
        for cls in _classes(modules, packages)
        for name, value in vars(cls).items()
        if type(value) in _CONTAINERS and not name.startswith("__")
    ]


def reached_outside(root: nn.Module) -> list[Any]:
    """Return the objects, other than modules, that methods of the user's classes and hooks in ``root`` can change.

    Args:
        root: A module, whose submodules count as well.
    """
    modules = list(root.modules())
    packages = packages_of(root)
    found = containers_of_classes(modules, packages)
    for function in functions_of(modules, packages):
        found += reached_by(function, depth=0)
    for module in modules:
        for hook in foreign_hooks(module):
            found += reached_by(hook)
    unique = {id(value): value for value in found if not isinstance(value, nn.Module)}
    return [value for value in unique.values() if _may_change(value)]


def _may_change(value: Any) -> bool:
    """Return whether ``value`` is a container of a class that is no library's own, and not large, or an object."""
    if isinstance(value, dict | list | deque | set):
        return type(value) in _CONTAINERS and len(value) < MANY_ITEMS
    return True


def _classes(modules: Iterable[nn.Module], packages: Collection[str]) -> list[type]:
    classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__)
    return [cls for cls in classes if cls.__module__.partition(".")[0] in packages]
