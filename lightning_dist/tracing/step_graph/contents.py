"""Read and set the content of a model's attributes: items of containers, and attributes of the user's objects.

A step may change this content, for example if it counts in a dictionary, or calls an object that lowers a temperature.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["is_object", "items_of", "packages_of", "set_items"]

_LIBRARIES = frozenset(
    {"builtins", "lightning", "lightning_dist", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics"}
)


def packages_of(root: nn.Module, objects: Iterable[Any] = ()) -> frozenset[str]:
    """Return the names of the top-level packages of the classes of ``root``, its modules and ``objects``."""
    return frozenset(_package(type(value)) for value in (*root.modules(), *objects)) - _LIBRARIES


def is_object(value: Any, packages: Collection[str]) -> bool:
    """Return whether ``value`` is a plain object whose attributes a step may change.

    Args:
        value: Value of a module's attribute, or something that such a value contains.
        packages: Names of the packages that the classes of such objects come from, from :func:`packages_of`.
    """
    if isinstance(value, Tensor | nn.Module | type | types.FunctionType | dict | list | deque | set | tuple):
        return False
    return hasattr(value, "__dict__") and (_package(type(value)) in packages or type(value) is types.SimpleNamespace)


def items_of(value: Any, packages: Collection[str]) -> list[Any] | None:
    """Return the items of a container or the attributes of an object; None if ``value`` is neither.

    Args:
        value: Value of a module's attribute, or something that such a value contains.
        packages: Names of the packages whose classes count as the user's, from :func:`packages_of`.
    """
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | deque | set):
        return list(value)
    return list(vars(value).items()) if is_object(value, packages) else None


def set_items(value: Any, items: list[Any]) -> None:
    """Replace the content of ``value`` by ``items``, which :func:`items_of` has returned for it before.

    The methods of the built-in classes are called, because a subclass may refuse changes, as diffusers' ``FrozenDict``
    does, or do something else as well.
    """
    container = value if isinstance(value, dict | list | deque | set) else vars(value)
    if isinstance(container, dict):
        if _are_same([part for item in items for part in item], [part for item in container.items() for part in item]):
            return
        mapping: type[dict[Any, Any]] = OrderedDict if isinstance(container, OrderedDict) else dict
        mapping.clear(container)
        for key, item in items:
            mapping.__setitem__(container, key, item)
    elif not _are_same(items, list(container)):
        base: Any = next(cls for cls in (list, deque, set) if isinstance(container, cls))
        base.clear(container)
        add: Any = set.update if base is set else base.extend
        add(container, items)


def _are_same(before: list[Any], now: list[Any]) -> bool:
    """Return whether two lists have the same objects in the same order."""
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]
