"""Undo what a forward of a block has changed in attributes of its modules, while the block runs again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_dist.tracing.step_graph.contents import items_of, set_items

__all__ = ["BlockAttributes", "Changes"]

_ABSENT = object()


@dataclass
class Changes:
    """Hold what a forward has changed.

    Args:
        attributes: Module, name and earlier value of each changed attribute.
        contents: Each list, dictionary, deque or set whose content has changed, with its earlier items.
    """

    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    contents: list[tuple[Any, list[Any]]] = field(default_factory=list)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the changes in this context, and restore the present values at its end."""
        now = [(module, key, vars(module).get(key, _ABSENT)) for module, key, _ in self.attributes]
        items_now = [(container, items_of(container, ()) or []) for container, _ in self.contents]
        _set(self.attributes, self.contents)
        try:
            yield
        finally:
            _set(now, items_now)


def _set(attributes: list[tuple[nn.Module, str, Any]], contents: list[tuple[Any, list[Any]]]) -> None:
    for module, key, value in attributes:
        if value is _ABSENT:
            vars(module).pop(key, None)
        else:
            vars(module)[key] = value
    for container, items in contents:
        set_items(container, items)


class BlockAttributes:
    """Find out which attributes of ``block`` and its modules a forward changes.

    Of lists and other containers, the content is compared in the first forward only, because that takes long.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        self._containers: list[Any] | None = None

    @contextmanager
    def recorded(self) -> Iterator[Changes]:
        """Record the changes of a forward, which runs in this context, in the object that is given."""
        changes = Changes()
        before = [dict(vars(module)) for module in self._modules]
        is_first = self._containers is None
        containers = _containers_in(before) if self._containers is None else self._containers
        contents = [(container, items_of(container, ()) or []) for container in containers]
        yield changes
        for module, values in zip(self._modules, before, strict=True):
            now = vars(module)
            changes.attributes += [(module, key, value) for key, value in values.items() if now.get(key) is not value]
            if len(now) != len(values) or changes.attributes:
                changes.attributes += [(module, key, _ABSENT) for key in now.keys() - values.keys()]
        changes.contents = [(container, items) for container, items in contents if not _are_same(container, items)]
        if is_first:
            self._containers = [container for container, _ in changes.contents]


def _containers_in(attributes: list[dict[str, Any]]) -> list[Any]:
    """Return the containers of the user among the attributes; torch's own have names that begin with an underscore."""
    values = (value for each in attributes for key, value in each.items() if not key.startswith("_"))
    return [value for value in values if items_of(value, ()) is not None]


def _are_same(container: Any, items: list[Any]) -> bool:
    now = items_of(container, ()) or []
    return len(now) == len(items) and all(one is other for one, other in zip(_flat(now), _flat(items), strict=True))


def _flat(items: list[Any]) -> list[Any]:
    """Return the items, with the pairs of dictionaries taken apart, which are made anew whenever they are asked for."""
    return [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
