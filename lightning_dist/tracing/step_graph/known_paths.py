"""Remember the paths that a step takes, and the plain values that each path depends on, besides the batch.

While a step is traced, every plain value that it reads from a module, from the Trainer or from its own arguments is
recorded (``self.current_epoch``, ``self.use_auxiliary``, ``self.config``, ``batch_idx``). Before a later step these
values are compared with the current ones, and the step is traced again if one has changed. A number that has changed
once is watched from then on (see :mod:`lightning_dist.tracing.step_graph.watched_numbers`): the outcomes of the step's
comparisons with it are compared, and not its value, so that a step with ``if self.global_step > 1000`` is traced twice
and not every time.
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

from lightning_dist.tracing.step_graph.graph import StepGraph
from lightning_dist.tracing.step_graph.watched_numbers import watched

__all__ = ["KnownPaths", "Readable"]

Readable = Mapping[type, Collection[str]]
"""Classes other than modules, each with the names of its attributes that a step's path may depend on."""

_Source = tuple[int, str]
"""The source of a value that a step reads: the ``id`` of an object, and the name of its attribute."""

_MAX_PATHS = 64
"""Maximum number of paths that are remembered for one kind of step."""

_MAX_NEEDLESS_TRACES = 8
"""Number of traces with an unchanged path that changes of one value may cause before the value is ignored."""

_MAX_COMPARED_ITEMS = 200
"""Maximum number of items of a container whose items are compared; of a larger container, only the type is."""

_PLAIN = (int, float, bool, str, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


class _Absent:
    """Mark an attribute that does not exist."""


@dataclass(frozen=True)
class _Read:
    """Represent an attribute that a step has read.

    Args:
        owner: The module or other object whose attribute was read.
        name: Name of the attribute in ``owner``.
        outline: Function that returns the properties of the value that are compared; None if the value is plain and is
            compared itself.
        result: The value, or the result of ``outline`` for it, at the time when the step was traced.
    """

    owner: Any
    name: str
    outline: Callable[[Any], Any] | None
    result: Any

    @property
    def source(self) -> _Source:
        return id(self.owner), self.name

    def is_as_before(self) -> bool:
        now = getattr(self.owner, self.name, _Absent)
        if self.outline is not None:
            now = self.outline(now)
        return now is self.result or (type(now) is type(self.result) and bool(now == self.result))


@dataclass(frozen=True)
class _NumberUse:
    """Represent a comparison or conversion of a watched number in a step, and its outcome.

    Args:
        source: The attribute that holds the number.
        evaluate: Function that repeats the comparison with the current number.
        result: The outcome at the time when the step was traced.
    """

    source: _Source
    evaluate: Callable[[], Any]
    result: Any

    def is_as_before(self) -> bool:
        return bool(self.evaluate() == self.result)


@dataclass(frozen=True)
class _Path:
    graph: StepGraph
    depends_on: Sequence[_Read | _NumberUse]
    number: int

    def is_taken(self) -> bool:
        return all(known.is_as_before() for known in self.depends_on)


class _Arguments:
    """Hold the arguments of the running step as attributes, which are named by their positions."""


@dataclass
class KnownPaths:
    """Remember the paths of one kind of step.

    Args:
        root: The user's module; a path may depend on its attributes and on those of the modules in it.
        readable: Classes besides modules whose attributes a path may depend on, each with the names of these
            attributes.
    """

    root: nn.Module
    readable: Readable
    _paths: list[_Path] = field(default_factory=list)
    _arguments: _Arguments = field(default_factory=_Arguments)
    _watched: set[_Source] = field(default_factory=set)
    _needless_traces: Counter[_Source] = field(default_factory=Counter)
    _owners: dict[int, Any] = field(default_factory=dict)
    _num_traced: int = 0
    _traced: tuple[StepGraph, _Reads, set[_Source]] | None = None

    def taken(self, arguments: Sequence[Any]) -> int:
        """Return the number of the known path that a step takes, or -1 if it takes none of them.

        Args:
            arguments: The arguments of the step after its batch.
        """
        vars(self._arguments).update({f"_{place}": value for place, value in enumerate(arguments)})
        for path in reversed(self._paths):
            if path.is_taken():
                return path.number
        return -1

    def known(self, number: int) -> StepGraph:
        """Return the graph of the path with this number, which :meth:`taken` or :meth:`trace` has returned."""
        return next(path.graph for path in self._paths if path.number == number)

    def reads_from(self, number: int, classes: tuple[type, ...]) -> bool:
        """Return whether the path with this number depends on attributes of objects of one of ``classes``."""
        path = next(path for path in self._paths if path.number == number)
        return any(isinstance(self._owners.get(known.source[0]), classes) for known in path.depends_on)

    def trace(self, arguments: Sequence[Any], trace: Callable[[Sequence[Any]], StepGraph]) -> int:
        """Trace a step, and return the number of a known path that is equal to its path, or -1 if there is none.

        Args:
            arguments: The arguments of the step after its batch, for which :meth:`taken` was called before.
            trace: Function that traces the step with the arguments that it is given.
        """
        changed: set[_Source] = set()
        # Numbers among the arguments, such as batch_idx, are watched from the first trace, because they soon change.
        if not self._paths:
            self._watched |= {
                (id(self._arguments), name)
                for name, value in vars(self._arguments).items()
                if type(value) in (int, float)
            }
        else:
            for known in self._paths[-1].depends_on:
                if not known.is_as_before():
                    changed.add(known.source)
                    if isinstance(known, _Read) and type(known.result) in (int, float):
                        self._watched.add(known.source)
        reads = _Reads(self.root, self.readable, self._watched)
        with reads.watching():
            graph = trace(reads.of_arguments(self._arguments, len(arguments)))
        self._traced = graph, reads, changed
        return next((path.number for path in self._paths if _is_equal(path.graph, graph)), -1)

    def remember(self, number: int) -> StepGraph:
        """Remember the path of the step that :meth:`trace` traced last, and return its graph.

        Args:
            number: The number of a known path that is equal to this path on all ranks, or -1 if there is none.
        """
        assert self._traced is not None
        (graph, reads, changed), self._traced = self._traced, None
        if number >= 0:
            graph = self.known(number)
        if self._paths and graph is self._paths[-1].graph:
            self._needless_traces.update(changed)
        ignored = {source for source, times in self._needless_traces.items() if times >= _MAX_NEEDLESS_TRACES}
        self._owners |= reads.owners  # The objects are kept alive, so that no other object gets the same id.
        depends_on = [known for known in reads.known(graph) if known.source not in ignored]
        self._paths.append(_Path(graph, depends_on, self._num_traced))
        self._num_traced += 1
        del self._paths[:-_MAX_PATHS]
        return graph


class _Reads:
    """Record the plain values that a step reads while it runs.

    Args:
        root: The user's module; the attributes that are read from it and from the modules in it are recorded.
        readable: Classes besides modules whose attributes are recorded, each with the names of these attributes.
        numbers: The sources of numbers that are to be watched.
    """

    def __init__(self, root: nn.Module, readable: Readable, numbers: Collection[_Source]) -> None:
        self._root = root
        self._readable = readable
        self._numbers = numbers
        self._values: dict[_Source, Any] = {}
        self._number_uses: list[_NumberUse] = []
        self._before = {id(module): dict(vars(module)) for module in root.modules()}
        self._is_plain: dict[tuple[type, str], bool] = {}
        self._settings: set[int] = set()
        self.owners: dict[int, Any] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the values that are read in this context."""
        with ExitStack() as classes:
            classes.enter_context(_reading(nn.Module, self._of_module))
            for readable, names in self._readable.items():
                classes.enter_context(_reading(readable, partial(self._of_other, frozenset(names))))
            yield

    def of_arguments(self, arguments: _Arguments, number: int) -> list[Any]:
        """Return the arguments of the step, recorded as values that it reads and with watched numbers replaced.

        Args:
            arguments: Object that holds the arguments of the step after its batch, by their positions.
            number: Number of arguments that this step was given.
        """
        names = [f"_{place}" for place in range(number)]
        return [self._noted(arguments, name, vars(arguments)[name]) for name in names]

    def known(self, graph: StepGraph) -> list[_Read | _NumberUse]:
        """Return the recorded reads that decide whether a later step takes the path with this graph."""
        # Attributes that change inside parts do not influence the code between parts, so only their types are compared.
        in_parts = {(id(self._root.get_submodule(owner)), key) for owner, key in graph.changed_in_parts}
        changed = in_parts | {(id(self._root.get_submodule(owner)), key) for owner, key in graph.changed}
        found: list[_Read | _NumberUse] = list(self._number_uses)
        for (owner, name), value in self._values.items():
            if isinstance(value, _PLAIN) and (owner, name) in in_parts:
                found.append(_Read(self.owners[owner], name, type, type(value)))
            elif isinstance(value, _PLAIN):
                found.append(_Read(self.owners[owner], name, None, value))
            else:
                outline = _is_empty if (owner, name) in changed else _outline
                found.append(_Read(self.owners[owner], name, outline, outline(value)))
        return found

    def _of_module(self, module: Any, name: str, value: Any) -> Any:
        if name in _TORCH_ATTRIBUTES or name.startswith("__"):
            return value
        kind = type(value)
        if kind not in _PLAIN and not isinstance(value, _CONTAINERS) and not _is_settings(value):
            return value
        cls = type(module)
        # Attributes of torch's layers are sizes and options, which do not change, except the dropout probability p.
        if cls.__module__.startswith("torch.nn.") and name != "p":
            return value
        key = (cls, name)
        if key not in self._is_plain:
            static = inspect.getattr_static(cls, name, None)
            self._is_plain[key] = not hasattr(static, "__get__") and not isinstance(static, property)
        if not self._is_plain[key]:
            return value  # The attributes that the property reads are recorded instead.
        before = self._before.get(id(module))
        own = object.__getattribute__(module, "__dict__")
        if before is not None and own.get(name, _Absent) is not before.get(name, _Absent):
            return value  # The step itself has set the attribute.
        return self._noted(module, name, value)

    def _of_other(self, names: Collection[str], owner: Any, name: str, value: Any) -> Any:
        return self._noted(owner, name, value) if name in names and isinstance(value, _PLAIN) else value

    def _noted(self, owner: Any, name: str, value: Any) -> Any:
        source = (id(owner), name)
        if _is_settings(value):
            if id(value) in self._settings:
                return value  # All layers of a model often share one configuration, which is recorded once.
            self._settings.add(id(value))
        self.owners[id(owner)] = owner
        if source in self._numbers and type(value) in (int, float):
            return watched(value, partial(getattr, owner, name), partial(self._record_use, source))
        if isinstance(value, (*_PLAIN, *_CONTAINERS)) or _is_settings(value):
            self._values.setdefault(source, value)
        return value

    def _record_use(self, source: _Source, evaluate: Callable[[], Any], result: Any) -> Any:
        self._number_uses.append(_NumberUse(source, evaluate, result))
        return result


@contextmanager
def _reading(cls: type, on_read: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """Pass every attribute that is read from instances of ``cls`` in this context through ``on_read``.

    Args:
        cls: The class whose ``__getattribute__`` is replaced.
        on_read: Function of the instance, the attribute's name and its value, which returns the value to use instead.
    """
    own = vars(cls).get("__getattribute__")
    get: Callable[[Any, str], Any] = getattr(cls, "__getattribute__")  # noqa: B009 - as below
    depth = 0

    def read(instance: Any, name: str) -> Any:
        nonlocal depth
        value = get(instance, name)
        if depth:  # on_read itself reads attributes.
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
    """Return whether ``value`` is an object such as a configuration, of a class neither torch's nor Python's."""
    if isinstance(value, (*_PLAIN, *_CONTAINERS, Tensor, nn.Module, type)) or callable(value):
        return False
    module = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and module not in ("torch", "lightning", "lightning_fabric", "pytorch_lightning",
        "builtins", "collections", "functools", "lightning_dist")  # fmt: skip


def _is_empty(value: Any) -> Any:
    try:
        return not value
    except Exception:  # The truth value of an object of the user's class may be undefined.
        return type(value)


def _outline(value: Any) -> Any:
    """Return the plain values that ``value`` contains, and the types of the other values in it."""
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, _CONTAINERS):
        value = vars(value) if hasattr(value, "__dict__") else {}
    if len(value) > _MAX_COMPARED_ITEMS:
        return type(value)
    if isinstance(value, dict):
        return [(key, item if isinstance(item, _PLAIN) else type(item)) for key, item in value.items()]
    return [item if isinstance(item, _PLAIN) else type(item) for item in value]


def _is_equal(graph: StepGraph, other: StepGraph) -> bool:
    try:
        return bool(graph == other)
    except Exception:  # An object that a part returns may not support comparison.
        return False
