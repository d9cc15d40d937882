"""Give a step the items of its module's iterators once more that a run of the step on fake tensors has taken."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["iterators_rewound"]

_DEPTH = 3
"""Number of levels of lists and dictionaries in a module's attributes that are searched for iterators."""

_OF_TORCH = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has, such as the dictionary of its submodules."""


class _Watched(Iterator[Any]):
    """Stand in for an iterator: remember each item that is taken, and give these first after :meth:`rewound`.

    Args:
        rest: The iterator. All other attributes are its own.
        on_next: Function that is called before an item is taken.
    """

    def __init__(self, rest: Iterator[Any], on_next: Callable[[], None]) -> None:
        self._rest = rest
        self._first = deque[Any]()
        self._on_next = on_next
        self._taken: list[Any] | None = []

    def __next__(self) -> Any:
        if self._taken is None:
            return self._first.popleft() if self._first else next(self._rest)
        self._on_next()
        self._taken.append(_next_of(self._rest))
        return self._taken[-1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_rest" not in vars(self):  # Copying and unpickling ask for special methods.
            raise AttributeError(name)
        return getattr(self._rest, name)

    def rewound(self) -> Iterator[Any]:
        """Return an iterator with all items that were left when this object was made."""
        if not self._taken:
            return self._rest
        self._first, self._taken = deque(self._taken), None
        return self


class _WatchedWithLength(_Watched):
    def __len__(self) -> int:
        return len(self._rest)  # type: ignore[arg-type]


def _next_of(iterator: Iterator[Any]) -> Any:
    """Return the next item, whose tensors are no fakes: modes of torch hold for the thread that has entered them."""
    with ThreadPoolExecutor(1) as thread:
        item = thread.submit(next, iterator, _END).result()
    if item is _END:
        raise StopIteration
    return item


_END = object()


@contextmanager
def iterators_rewound(root: nn.Module, on_next: Callable[[str], None]) -> Iterator[None]:
    """Let the iterators that are attributes of ``root`` and its modules have the same next items afterwards as before.

    Iterators in lists and dictionaries are found as well; those that only other objects hold are not.

    Args:
        root: The module whose step is traced.
        on_next: Function that is called with the attribute's name whenever the step takes an item.
    """
    watched: list[tuple[Any, Any, _Watched]] = []
    for container, key, iterator, name in _places(root):
        kind = _WatchedWithLength if hasattr(type(iterator), "__len__") else _Watched
        stand_in = kind(iterator, lambda name=name: on_next(name))  # type: ignore[misc]
        container[key] = stand_in
        watched.append((container, key, stand_in))
    try:
        yield
    finally:
        for container, key, stand_in in watched:
            container[key] = stand_in.rewound()


def _places(root: nn.Module) -> list[tuple[Any, Any, Iterator[Any], str]]:
    """Return container, key, iterator and name of each iterator that is found."""
    found: list[tuple[Any, Any, Iterator[Any], str]] = []

    def search(container: Any, name: str, depth: int) -> None:
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(items):
            inner = f"{name}.{key}" if depth == _DEPTH else f"{name}[{key!r}]"
            if isinstance(value, Iterator):
                if not isinstance(value, io.IOBase):
                    found.append((container, key, value, inner))
            elif type(value) in (dict, list) and depth and (depth < _DEPTH or key not in _OF_TORCH):
                search(value, inner, depth - 1)

    for name, module in root.named_modules():
        search(vars(module), f"self.{name}".strip("."), _DEPTH)
    return found
