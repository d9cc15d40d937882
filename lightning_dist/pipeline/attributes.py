"""What a step leaves in a module's attributes: of the last stage, on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn

__all__ = ["keep", "restore", "unchanged"]

Names = Sequence[tuple[str, str]]
"""Of attributes: the module's name, and the attribute's."""


class _Absent:
    """The attribute does not exist."""


def keep(root: nn.Module, names: Names) -> list[tuple[Any, Any]]:
    """The values of attributes, and what is in them where they are containers."""
    values = [vars(root.get_submodule(module)).get(key, _Absent) for module, key in names]
    return [(value, copy(value) if isinstance(value, list | dict | set | deque) else None) for value in values]


def restore(root: nn.Module, names: Names, kept: Sequence[tuple[Any, Any]]) -> None:
    """Put back what :func:`keep` returned."""
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
    """Whatever is done to the attributes inside is undone."""
    kept = keep(root, names)
    try:
        yield
    finally:
        restore(root, names, kept)
