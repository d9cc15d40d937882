"""Undo what a forward of a block has changed in lists and other containers, while the block runs again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_dist.tracing.step_graph.contents import items_of, packages_of, set_items

__all__ = ["BlockContainers", "undone"]

Changes = list[tuple[Any, list[Any]]]
"""Each list, dictionary, deque, set or object of the user's whose content has changed, with its earlier items."""


class BlockContainers:
    """Find out which containers among the attributes of ``block`` and its modules a forward changes.

    All of them are compared in the first forward only, because that takes long.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        self.packages = packages_of(block)
        self._changing: list[Any] | None = None

    @contextmanager
    def recorded(self) -> Iterator[Changes]:
        """Record the changes of a forward, which runs in this context, in the list that is given."""
        changes: Changes = []
        containers = self._all() if self._changing is None else self._changing
        contents = [(container, items_of(container, self.packages) or []) for container in containers]
        yield changes
        changes += [
            (container, items)
            for container, items in contents
            if not _are_same(items_of(container, self.packages) or [], items)
        ]
        if self._changing is None:
            self._changing = [container for container, _ in changes]

    def _all(self) -> list[Any]:
        """Return the user's containers among the attributes; names of torch's own begin with an underscore."""
        attributes = [vars(module) for module in self._modules]
        values = (value for each in attributes for key, value in each.items() if not key.startswith("_"))
        return [value for value in values if items_of(value, self.packages) is not None]


@contextmanager
def undone(changes: Changes, packages: Collection[str]) -> Iterator[None]:
    """Undo the changes in this context, and restore the present items at its end.

    Args:
        changes: What :meth:`BlockContainers.recorded` has recorded.
        packages: The user's packages, whose objects count as containers of their attributes.
    """
    now = [(container, items_of(container, packages) or []) for container, _ in changes]
    for container, items in changes:
        set_items(container, items)
    try:
        yield
    finally:
        for container, items in now:
            set_items(container, items)


def _are_same(now: list[Any], items: list[Any]) -> bool:
    return len(now) == len(items) and all(one is other for one, other in zip(_flat(now), _flat(items), strict=True))


def _flat(items: list[Any]) -> list[Any]:
    """Return the items, with the pairs of dictionaries taken apart, which are made anew whenever they are asked for."""
    return [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
