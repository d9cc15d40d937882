"""Let a block run again with what its code has found outside of it in its forward, and leave nothing behind there."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_dist._compat import ForeignHooks, foreign_hooks, own_buffers, version_of
from lightning_dist.tracing.step_graph.contents import items_of, packages_of, set_items
from lightning_dist.tracing.step_graph.reached import MANY_ITEMS, containers_of_classes, functions_of, referred

__all__ = ["OutsideState"]

_FEW_ELEMENTS = 2**14
"""Number of elements up to which tensors are copied, because a hook may change them in place."""

_DEPTH = 3
"""Number of containers inside of one another that are looked into."""

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_ABSENT = object()


class OutsideState:
    """Undo in reruns what the code of ``block`` and the user's hooks inside of it change outside of it.

    A hook may count in an attribute of the LightningModule, and a block may append its auxiliary loss to a global list.
    They run again in a rerun, where they find what they have found in the forward, and what they change there is
    dropped. This holds for that to which hooks, methods of the user's modules, and functions that these call refer: the
    object of a method, variables of an enclosing function, global containers, and containers of the user's classes.

    Args:
        block: A module that runs again, whose own hooks do not.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._modules = block, set(block.modules())
        inside = {name: module for name, module in block.named_modules() if module is not block}
        self._inside = list(inside.values())
        self._hooks = ForeignHooks(inside)
        packages = packages_of(block)
        functions = functions_of(self._modules, packages)
        self._functions = [f for f in functions if any(_is_state(value, packages) for value in referred(f))]
        self._of_classes = containers_of_classes(self._modules, packages)

    def begin(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that returns contexts: the first one for a forward, the others for its reruns."""
        if not self._functions and not self._of_classes and not self._hooks.find():
            return nullcontext
        changes: list[_Change] = []
        has_begun = False

        @contextmanager
        def context() -> Iterator[None]:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                recorded = [_Record(place) for place in self._reachable()]
                yield
                changes.extend(change for record in recorded if (change := record.change()) is not None)
                return
            now = [place.read() for place, _, _ in changes]
            for place, keys, items in changes:
                place.write(keys, {key: _copy(value) for key, value in items.items()})
            try:
                yield
            finally:
                for (place, keys, _), items in zip(changes, now, strict=True):
                    place.write(keys, items)

        return context

    def _reachable(self) -> list[_Place]:
        """Return all places to which the functions of the block and the hooks refer."""
        reached: dict[int, _Place] = {}
        hooks: list[Callable[..., Any]] = [hook for module in self._inside for hook in foreign_hooks(module)]
        functions: list[Callable[..., Any]] = [*hooks, *self._functions]
        values = [value for function in functions for value in referred(function)]
        # The object of a hook, or one that is a hook, may be of a library.
        packages = packages_of(self._block, [getattr(hook, "__self__", hook) for hook in hooks])
        for value in (*values, *self._of_classes):
            self._reach(value, packages, reached, _DEPTH)
        return list(reached.values())

    def _reach(self, value: Any, packages: Collection[str], reached: dict[int, _Place], depth: int) -> None:
        if not depth or id(value) in reached:
            return
        place: _Place
        if isinstance(value, nn.Module):
            if value in self._modules:
                return
            place = _Attributes(value)
        elif isinstance(value, types.CellType):
            place = _Variable(value)
        else:
            items = items_of(value, packages)
            if items is None or len(items) >= MANY_ITEMS:
                return
            place = _Container(value, packages)
        reached[id(value)] = place
        for item in place.read().values():
            if isinstance(value, types.CellType) or not isinstance(item, nn.Module):
                self._reach(item, packages, reached, depth - 1)


class _Attributes:
    """Read and write the attributes and the buffers of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes, self._buffers = vars(module), own_buffers(module)

    def read(self) -> dict[Any, Any]:
        own = {name: value for name, value in self._attributes.items() if name not in _TORCH_ATTRIBUTES}
        return {**own, **self._buffers}

    def write(self, keys: Collection[Any], items: Mapping[Any, Any]) -> None:
        for key in keys:
            held: dict[str, Any] = self._buffers if key in self._buffers else self._attributes
            held.pop(key, None)
            if key in items:
                held[key] = items[key]


class _Variable:
    """Read and write a variable of an enclosing function."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def read(self) -> dict[Any, Any]:
        try:
            return {"": self._cell.cell_contents}
        except ValueError:  # It has no value yet.
            return {}

    def write(self, keys: Collection[Any], items: Mapping[Any, Any]) -> None:
        for value in items.values():
            self._cell.cell_contents = value


class _Container:
    """Read and write the items of a container, or the attributes of an object."""

    def __init__(self, value: Any, packages: Collection[str]) -> None:
        self._value, self._packages = value, packages

    def read(self) -> dict[Any, Any]:
        items = items_of(self._value, self._packages) or []
        return dict(enumerate(items) if isinstance(self._value, list | deque | set) else items)

    def write(self, keys: Collection[Any], items: Mapping[Any, Any]) -> None:
        has_keys = not isinstance(self._value, list | deque | set)
        set_items(self._value, list(items.items() if has_keys else items.values()))


_Place = _Attributes | _Variable | _Container


class _Change(NamedTuple):
    """Hold what a place had before a forward, under the keys whose values the forward has changed, or under all."""

    place: _Place
    keys: list[Any]
    items: dict[Any, Any]


class _Record:
    """Record what ``place`` has before a forward, with copies of small tensors."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._items = place.read()
        self._copies = {key: (_copy(value), version_of(value)) for key, value in self._items.items() if _is_few(value)}

    def change(self) -> _Change | None:
        """Return what the forward has changed; None: nothing."""
        now = self._place.read()
        changed = [key for key in {**self._items, **now} if now.get(key, _ABSENT) is not self._items.get(key, _ABSENT)]
        in_place = [key for key, (_, version) in self._copies.items() if version_of(self._items[key]) != version]
        if not changed and not in_place:
            return None
        before = {**self._items, **{key: self._copies[key][0] for key in in_place}}
        if isinstance(self._place, _Attributes):
            before = {key: value for key, value in before.items() if key in changed or key in in_place}
        return _Change(self._place, list(dict.fromkeys((*changed, *in_place))), before)


def _is_state(value: Any, packages: Collection[str]) -> bool:
    return isinstance(value, types.CellType) or items_of(value, packages) is not None


def _is_few(value: Any) -> bool:
    return type(value) is Tensor and value.numel() <= _FEW_ELEMENTS and not value.is_inference()


def _copy(value: Any) -> Any:
    return value.clone() if _is_few(value) else value
