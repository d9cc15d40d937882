"""Save and restore attributes of modules that a step changes.

What a step leaves in attributes is taken from the last stage on every rank, so other runs of the step are undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_dist.step_graph import items_of, packages_of, set_items

__all__ = ["keep", "restore", "unchanged"]

Names = Sequence[tuple[str, str]]
"""Names of attributes, each as the module's name and the attribute's name."""


class _Absent:
    """Mark an attribute that does not exist."""


def keep(root: nn.Module, names: Names) -> list[tuple[Any, list[Any] | None]]:
    """Return the values of attributes, each with what it contains if it is a container or an object of the user's.

    Args:
        root: The user's module.
        names: The names of the attributes.
    """
    values = [vars(root.get_submodule(module)).get(key, _Absent) for module, key in names]
    packages = packages_of(root) if names else frozenset()
    return [(value, items_of(value, packages)) for value in values]


def restore(root: nn.Module, names: Names, kept: Sequence[tuple[Any, list[Any] | None]]) -> None:
    """Restore attributes, and the items of their containers, to what :func:`keep` returned.

    Args:
        root: The user's module.
        names: The names of the attributes, as for :func:`keep`.
        kept: The result of :func:`keep`.
    """
    for (module, key), (value, items) in zip(names, kept, strict=True):
        attributes = vars(root.get_submodule(module))
        if value is _Absent:
            attributes.pop(key, None)
            continue
        attributes[key] = value
        if items is not None:
            set_items(value, items)


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
