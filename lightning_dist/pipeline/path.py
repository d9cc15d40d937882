"""Paths that a step takes, and what they depend on besides the batch: numbers and switches that its code reads.

While a step is followed, every plain value is noted that it reads from a module, from the Trainer or among its own
arguments (``self.current_epoch``, ``self.use_auxiliary``, ``self.config``, ``batch_idx``). Before a later step, these
are compared; where one has changed, the step is followed again. A number that has changed once is watched from then on
(see :mod:`lightning_dist.watched_numbers`): then not its value is compared, but the answers to what the step asks of
it, so that ``if self.global_step > 1000`` is followed twice, and not in every step.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_dist.pipeline.graph import StepGraph
from lightning_dist.watched_numbers import watched

__all__ = ["KnownPaths", "Readable"]

Readable = Mapping[type, Collection[str]]
"""Classes that are no modules, and the attributes of theirs that a step's path may depend on."""

_Source = tuple[int, str]
"""Where a value is read: the ``id`` of the object, and the attribute."""

_MOST_PATHS = 64
"""Paths of one kind of step that are remembered."""

_MOST_IN_VAIN = 8
"""How often a step is followed again because of one value without another result, until the value is ignored."""

_MOST_ITEMS = 200
"""Items of a container that are compared; of a larger one only whether it is empty."""

_PLAIN = (int, float, bool, str, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_OF_TORCH = frozenset(vars(nn.Module()))


class _Absent:
    """The attribute does not exist."""


@dataclass(frozen=True)
class _Read:
    """An attribute that a step has read.

    Args:
        owner: The object.
        name: The attribute.
        outline: What is compared of its value; None: the value itself, which is plain.
        answer: The value, or its outline.
    """

    owner: Any
    name: str
    outline: Callable[[Any], Any] | None
    answer: Any

    @property
    def source(self) -> _Source:
        return id(self.owner), self.name

    def is_as_before(self) -> bool:
        now = getattr(self.owner, self.name, _Absent)
        if self.outline is not None:
            now = self.outline(now)
        return now is self.answer or (type(now) is type(self.answer) and bool(now == self.answer))


@dataclass(frozen=True)
class _Question:
    """What a step has asked of a watched number, and the answer."""

    source: _Source
    ask: Callable[[], Any]
    answer: Any

    def is_as_before(self) -> bool:
        return bool(self.ask() == self.answer)


@dataclass(frozen=True)
class _Path:
    graph: StepGraph
    depends_on: Sequence[_Read | _Question]
    number: int

    def is_taken(self) -> bool:
        return all(known.is_as_before() for known in self.depends_on)


class _Arguments:
    """The plain arguments of the step that runs, as attributes that are named by their places."""


@dataclass
class KnownPaths:
    """The paths of one kind of step.

    Args:
        root: The user's module.
        readable: What else the step may read.
    """

    root: nn.Module
    readable: Readable
    _paths: list[_Path] = field(default_factory=list)
    _arguments: _Arguments = field(default_factory=_Arguments)
    _watched: set[_Source] = field(default_factory=set)
    _in_vain: Counter[_Source] = field(default_factory=Counter)
    _owners: dict[int, Any] = field(default_factory=dict)
    _num_followed: int = 0
    _followed: tuple[StepGraph, _Reads, set[_Source]] | None = None

    def taken(self, arguments: Sequence[Any]) -> int:
        """Return which of the known paths a step takes, by its number; -1: none.

        Args:
            arguments: Of the step, after its batch.
        """
        vars(self._arguments).update({f"_{place}": value for place, value in enumerate(arguments)})
        for path in reversed(self._paths):
            if path.is_taken():
                return path.number
        return -1

    def known(self, number: int) -> StepGraph:
        """Return the path that :meth:`taken` has named."""
        return next(path.graph for path in self._paths if path.number == number)

    def follow(self, arguments: Sequence[Any], follow: Callable[[Sequence[Any]], StepGraph]) -> int:
        """Follow a step, and return the number of a known path that is equal to its own; -1: there is none.

        Args:
            arguments: Of the step, after its batch; :meth:`taken` was given them before.
            follow: Follows the step, with these arguments.
        """
        changed: set[_Source] = set()
        if not self._paths:  # numbers that a step is given, as batch_idx, soon change
            self._watched |= {
                (id(self._arguments), name)
                for name, value in vars(self._arguments).items()
                if type(value) in (int, float)
            }
        else:
            for known in self._paths[-1].depends_on:
                if not known.is_as_before():
                    changed.add(known.source)
                    if isinstance(known, _Read) and type(known.answer) in (int, float):
                        self._watched.add(known.source)
        reads = _Reads(self.root, self.readable, self._watched)
        with reads.watching():
            graph = follow(reads.of_arguments(self._arguments, len(arguments)))
        self._followed = graph, reads, changed
        return next((path.number for path in self._paths if _is_equal(path.graph, graph)), -1)

    def remember(self, number: int) -> StepGraph:
        """Remember the path of the step that was followed last, and return it.

        Args:
            number: Of a known path that is equal to it on all ranks; -1: there is none.
        """
        assert self._followed is not None
        (graph, reads, changed), self._followed = self._followed, None
        if number >= 0:
            graph = self.known(number)
        if self._paths and graph is self._paths[-1].graph:
            self._in_vain.update(changed)
        ignored = {source for source, times in self._in_vain.items() if times >= _MOST_IN_VAIN}
        self._owners |= reads.owners  # they live on, so that nothing else gets their ids
        depends_on = [known for known in reads.known(graph) if known.source not in ignored]
        self._paths.append(_Path(graph, depends_on, self._num_followed))
        self._num_followed += 1
        del self._paths[:-_MOST_PATHS]
        return graph


class _Reads:
    """The plain values that a step reads while it runs.

    Args:
        root: The user's module.
        readable: See :data:`Readable`.
        numbers: Where numbers are read that are to be watched.
    """

    def __init__(self, root: nn.Module, readable: Readable, numbers: Collection[_Source]) -> None:
        self._root = root
        self._readable = readable
        self._numbers = numbers
        self._values: dict[_Source, Any] = {}
        self._asked: list[_Question] = []
        self._before = {id(module): dict(vars(module)) for module in root.modules()}
        self._is_plain: dict[tuple[type, str], bool] = {}
        self._settings: set[int] = set()
        self.owners: dict[int, Any] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, note what is read."""
        with ExitStack() as classes:
            classes.enter_context(_reading(nn.Module, self._of_module))
            for readable, names in self._readable.items():
                classes.enter_context(_reading(readable, partial(self._of_other, frozenset(names))))
            yield

    def of_arguments(self, arguments: _Arguments, number: int) -> list[Any]:
        """Return the step's arguments, which are read."""
        names = [f"_{place}" for place in range(number)]
        return [self._noted(arguments, name, vars(arguments)[name]) for name in names]

    def known(self, graph: StepGraph) -> list[_Read | _Question]:
        """Return what decides whether a step takes the path ``graph``."""
        changed = {(id(self._root.get_submodule(owner)), key) for owner, key in graph.changed}
        found: list[_Read | _Question] = list(self._asked)
        for (owner, name), value in self._values.items():
            if isinstance(value, _PLAIN):
                found.append(_Read(self.owners[owner], name, None, value))
            else:
                outline = _is_empty if (owner, name) in changed else _outline
                found.append(_Read(self.owners[owner], name, outline, outline(value)))
        return found

    def _of_module(self, module: Any, name: str, value: Any) -> Any:
        if name in _OF_TORCH or name.startswith("__"):
            return value
        kind = type(value)
        if kind not in _PLAIN and not isinstance(value, _CONTAINERS) and not _is_settings(value):
            return value
        cls = type(module)
        if cls.__module__.startswith("torch.nn.") and name != "p":  # a layer's sizes; p is of a dropout
            return value
        key = (cls, name)
        if key not in self._is_plain:
            static = inspect.getattr_static(cls, name, None)
            self._is_plain[key] = not hasattr(static, "__get__") and not isinstance(static, property)
        if not self._is_plain[key]:
            return value  # what the property reads is noted
        before = self._before.get(id(module))
        own = object.__getattribute__(module, "__dict__")
        if before is not None and own.get(name, _Absent) is not before.get(name, _Absent):
            return value  # the step itself has set it
        return self._noted(module, name, value)

    def _of_other(self, names: Collection[str], owner: Any, name: str, value: Any) -> Any:
        return self._noted(owner, name, value) if name in names and isinstance(value, _PLAIN) else value

    def _noted(self, owner: Any, name: str, value: Any) -> Any:
        source = (id(owner), name)
        if _is_settings(value):
            if id(value) in self._settings:
                return value  # one object that all of a model's layers share
            self._settings.add(id(value))
        self.owners[id(owner)] = owner
        if source in self._numbers and type(value) in (int, float):
            ask = partial(self._answered, source)
            return watched(value, partial(getattr, owner, name), ask)
        if isinstance(value, (*_PLAIN, *_CONTAINERS)) or _is_settings(value):
            self._values.setdefault(source, value)
        return value

    def _answered(self, source: _Source, question: Callable[[], Any], answer: Any) -> Any:
        self._asked.append(_Question(source, question, answer))
        return answer


@contextmanager
def _reading(cls: type, on_read: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """Inside, let ``on_read`` see what is read from instances of ``cls``, and give what it returns."""
    own = vars(cls).get("__getattribute__")
    get: Callable[[Any, str], Any] = getattr(cls, "__getattribute__")  # noqa: B009 - as below
    depth = 0

    def read(instance: Any, name: str) -> Any:
        nonlocal depth
        value = get(instance, name)
        if depth:  # on_read itself looks at attributes
            return value
        depth += 1
        try:
            return on_read(instance, name, value)
        finally:
            depth -= 1

    setattr(cls, "__getattribute__", read)  # noqa: B010 - mypy takes the attribute for a bound method
    try:
        yield
    finally:
        if own is None:
            del cls.__getattribute__
        else:
            cls.__getattribute__ = own  # type: ignore[method-assign]


def _is_settings(value: Any) -> bool:
    """Return whether ``value`` is an object such as a configuration, of a class that is not torch's nor Python's."""
    if isinstance(value, (*_PLAIN, *_CONTAINERS, Tensor, nn.Module, type)) or callable(value):
        return False
    module = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and module not in ("torch", "lightning", "lightning_fabric", "pytorch_lightning",
        "builtins", "collections", "functools", "lightning_dist")  # fmt: skip


def _is_empty(value: Any) -> Any:
    try:
        return not value
    except Exception:  # a class of the user's that cannot say
        return type(value)


def _outline(value: Any) -> Any:
    """Return the plain values in ``value``, and the types of others."""
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, _CONTAINERS):
        value = vars(value) if hasattr(value, "__dict__") else {}
    if len(value) > _MOST_ITEMS:
        return type(value)
    if isinstance(value, dict):
        return [(key, item if isinstance(item, _PLAIN) else type(item)) for key, item in value.items()]
    return [item if isinstance(item, _PLAIN) else type(item) for item in value]


def _is_equal(graph: StepGraph, other: StepGraph) -> bool:
    try:
        return bool(graph == other)
    except Exception:  # what a part returns besides tensors may have no answer
        return False
