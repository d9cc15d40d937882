"""Save and restore attributes of modules that a step changes.

What a step leaves in attributes is taken from the last stage on every rank, so other runs of the step are undone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn

__all__ = ["keep", "restore", "unchanged"]

Names = Sequence[tuple[str, str]]
"""Names of attributes, each as the module's name and the attribute's name."""


class _Absent:
    """Mark an attribute that does not exist."""


def keep(root: nn.Module, names: Names) -> list[tuple[Any, Any]]:
    """Return the values of attributes, each with a shallow copy of it if it is a container.

    Args:
        root: The user's module.
        names: The names of the attributes.
    """
    values = [vars(root.get_submodule(module)).get(key, _Absent) for module, key in names]
    return [(value, copy(value) if isinstance(value, list | dict | set | deque) else None) for value in values]


def restore(root: nn.Module, names: Names, kept: Sequence[tuple[Any, Any]]) -> None:
    """Restore attributes, and the items of their containers, to what :func:`keep` returned.

    Args:
        root: The user's module.
        names: The names of the attributes, as for :func:`keep`.
        kept: The result of :func:`keep`.
    """
    for (module, key), (value, content) in zip(names, kept, strict=True):
        attributes = vars(root.get_submodule(module))
        if value is _Absent:
            attributes.pop(key, None)
            continue
        attributes[key] = value
        if content is not None:
            value.clear()
            value.extend(content) if isinstance(value, list | deque) else value.update(content)


@contextmanager
def unchanged(root: nn.Module, names: Names) -> Iterator[None]:
    """Undo at the end of this context what is done to attributes in it.

    Args:
        root: The user's module.
        names: The names of the attributes.
    """
    kept = keep(root, names)
    try:
        yield
    finally:
        restore(root, names, kept)
