"""Save and restore attributes and hooks of modules that a step changes.

A rank runs the user's step once for each of its stages and microbatches. On every rank, attributes must end up with the
values that the run on the last stage gives them, so the changes that other runs make to attributes are undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_dist._compat import hooks_around_forward, own_buffers
from lightning_dist.tracing.step_graph import Undone, items_of, packages_of, set_items

__all__ = ["restore", "restoring_attributes", "restoring_undone", "save_attributes"]

Names = Sequence[tuple[str, str]]
"""Names of attributes, each as the module's name and the attribute's name."""


class _Absent:
    """Mark an attribute that does not exist."""


def save_attributes(root: nn.Module, names: Names) -> list[tuple[Any, list[Any] | None]]:
    """Return the values of attributes, together with the items of those that are containers or objects of the user's.

    Args:
        root: The user's module, in which the modules of ``names`` are looked up.
        names: For each attribute, the full name of its module (empty for ``root``) and the attribute's own name.

    Returns:
        For each attribute, a pair: its value, or ``_Absent`` if it does not exist; and a list of the items that the
        value contains, or None if it is neither a container nor an object of a class of the user's.
    """
    values = [vars(root.get_submodule(module)).get(key, _Absent) for module, key in names]
    packages = packages_of(root) if names else frozenset()
    return [(value, items_of(value, packages)) for value in values]


def restore(root: nn.Module, names: Names, kept: Sequence[tuple[Any, list[Any] | None]]) -> None:
    """Restore attributes, and the items of their containers, to what :func:`save_attributes` returned.

    Args:
        root: The user's module, in which the modules of ``names`` are looked up.
        names: The same names, in the same order, that :func:`save_attributes` was given.
        kept: Result of :func:`save_attributes` for these names.
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
def restoring_attributes(root: nn.Module, names: Names) -> Iterator[None]:
    """Restore attributes at the end of this context to what they were at its start.

    Args:
        root: The user's module, in which the modules of ``names`` are looked up.
        names: For each attribute, the full name of its module (empty for ``root``) and the attribute's own name.
    """
    kept = save_attributes(root, names)
    try:
        yield
    finally:
        restore(root, names, kept)


@contextmanager
def restoring_undone(root: nn.Module, undone: Undone) -> Iterator[None]:
    """Restore at the end of this context what a step sets for the calls of parts, and would undo at its end.

    A stage ends where a later one begins, before the code of the step that undoes it.

    Args:
        root: The user's module.
        undone: Names of attributes, buffers, and modules with hooks.
    """
    places = [(own_buffers(root.get_submodule(name)), key) for name, key in undone.buffers]
    buffers = [held.get(key) for held, key in places]
    hooks = [held for name in undone.hooks for held in hooks_around_forward(root.get_submodule(name))]
    kept = [dict(held) for held in hooks]
    with restoring_attributes(root, undone.attributes):
        try:
            yield
        finally:
            for (held, key), buffer in zip(places, buffers, strict=True):
                held[key] = buffer
            for own, before in zip(hooks, kept, strict=True):
                own.clear()
                own.update(before)
