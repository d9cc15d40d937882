"""Run a step of a model on fake tensors, and report each call of a module or function to an observer.

Nothing is computed. The model may be on any device, also the meta device. Afterwards everything is restored: its
parameters, its attributes, the contents of the lists and dictionaries among them, and the items of its iterators.
"""

from __future__ import annotations

import dis
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from lightning_dist._compat import FakeTensorMode
from lightning_dist.model.own_generators import get_state, own_generators, set_state
from lightning_dist.model.tensor_places import put, tensor_places
from lightning_dist.tracing.step_graph.contents import items_of, packages_of, set_items
from lightning_dist.tracing.step_graph.errors import EndOfTraceError, RefusalError
from lightning_dist.tracing.step_graph.fake_rules import FakeRules
from lightning_dist.tracing.step_graph.iterators import iterators_rewound
from lightning_dist.tracing.step_graph.reached import reached_outside
from lightning_dist.tracing.step_graph.tensor_reads import MadeUpValues

__all__ = ["FailureReason", "Observer", "run_on_fakes", "tensors_in"]

_CACHED = type(functools.cache(lambda: None))
"""The type of functions decorated with ``functools.lru_cache``."""


class FailureReason(str):
    """Describe the exception that ended a step on fakes, by its type and the first line of its text."""

    error: Exception
    """The exception."""

    @classmethod
    def of(cls, error: Exception) -> FailureReason:
        """Return the text that describes ``error``."""
        text = str(error).strip().split("\n")[0]
        if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module):
            text += ", which nothing has set yet when the step is tried: set it in __init__ or in setup()"
        why_not = cls(f"{type(error).__name__}: {text}")
        why_not.error = error
        return why_not

    @property
    def fails_on_real_tensors(self) -> bool:
        """Return whether the step would fail on real tensors as well.

        This is assumed if the step's own code has raised the exception and all exceptions that caused it, rather than
        torch because of a fake tensor.
        """
        error: BaseException | None = self.error
        while error is not None:
            if not _is_raised_by_code(error):
                return False
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return True

    @property
    def is_of_own_code(self) -> bool:
        """Return whether a line of the user's code has raised the exception, and not torch or this package."""
        if isinstance(self.error, AttributeError) and isinstance(self.error.obj, nn.Module):
            return True  # torch raises it for the user's line.
        last = _last_frame(self.error)
        package = "" if last is None else last.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        return bool(package) and package not in ("torch", "lightning_dist")


def _last_frame(error: BaseException) -> types.TracebackType | None:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last


def _is_raised_by_code(error: BaseException) -> bool:
    """Return whether ``error`` comes from a ``raise`` statement, or a plain mistake, in code that knows no fakes."""
    last = _last_frame(error)
    if last is None:
        return False
    code, file = last.tb_frame.f_code, last.tb_frame.f_globals.get("__name__", "")
    if file.partition(".")[0] in ("torch", "lightning_dist") and not file.startswith("torch.nn."):
        return False
    return isinstance(error, _PLAIN_MISTAKES) or code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


_PLAIN_MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, KeyError, NameError, OSError)
"""Exceptions that Python itself raises, and that torch never raises merely because a tensor is a fake."""


class Observer(Protocol):
    """Observe a step as it runs on fakes. Its methods may raise :class:`EndOfTraceError` to end the step."""

    @property
    def functions(self) -> TorchFunctionMode:
        """Return the mode that is active during the step and is given every call of a torch function."""

    def on_input(self, tensor: Tensor) -> None:
        """Handle the fake of a tensor of the batch."""

    def on_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the beginning of a module's call."""

    def on_return(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Handle the end of a module's call, which has returned ``out``."""

    def on_next(self, name: str) -> None:
        """Handle that the step takes the next item of an iterator, the attribute ``name`` of the module."""

    def on_end(self, result: Any) -> None:
        """Handle the end of the step, which has returned ``result``; the attributes that it has set are still there."""


def run_on_fakes(
    root: nn.Module,
    step: Callable[[Callable[[Tensor], Tensor]], Any],
    device: torch.device,
    observer: Observer,
    with_gradients: bool = False,
    values: MadeUpValues | None = None,
) -> str:
    """Run ``step`` on fakes of the model's tensors, and return why it could not run to its end.

    Args:
        root: The model, on any device; it is unchanged afterwards.
        step: Function that runs the step. It is given a function that makes a fake of a tensor, and passes each tensor
            of the batch through it.
        device: Device that the fakes pretend to be on.
        observer: Object whose methods are called as the step runs.
        with_gradients: Whether gradients are enabled, so that ``requires_grad`` of the results is known.
        values: Mode that makes up the values that the step reads from tensors; None: the step ends at such a read.

    Returns:
        An empty text, or a :class:`FailureReason` of the exception that ended the step. Without ``values``, a step that
        reads a value, such as by ``loss.item()`` in a comparison, ends with one, because fakes have no values.

    Raises:
        RefusalError: If the observer raises it.
    """
    mode = FakeTensorMode(
        allow_non_fake_inputs=True,
        shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True),
        static_shapes=True,
    )

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        observer.on_input(result)
        return result

    with (
        iterators_rewound(root, observer.on_next),
        restored(root, reached_outside(root)),
        _cached_results_forgotten(root),
        _observed(root, observer),
        _quietly(),
    ):
        _swap_in_fakes(root, mode, device)
        rules = FakeRules(makes_up_sizes=values is not None)
        # Inference mode is off, because its tensors have no version counters.
        with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
            return _run_to_end(
                partial(step, fake), observer, (mode, rules, values or nullcontext(), observer.functions)
            )


def _run_to_end(step: Callable[[], Any], observer: Observer, contexts: Sequence[AbstractContextManager[Any]]) -> str:
    """Run ``step`` in ``contexts``, and return what :func:`run_on_fakes` returns.

    Raises:
        RefusalError: If the observer raises it.
    """
    try:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            try:
                result = step()
            except EndOfTraceError:
                result = None
            observer.on_end(result)
    except RefusalError:
        raise
    except Exception as error:  # The user's code may raise anything when tensors have no values.
        return FailureReason.of(error)
    return ""


def tensors_in(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, which may be nested mappings, lists, tuples and sets.

    Args:
        value: Arguments or result of a module or function, or any other value that may contain tensors.
        depth: Number of levels of containers to look into, since a container may contain itself.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _COLLECTIONS):  # They are checked first, because a check for Mapping is slow.
        for item in value if depth else ():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, Mapping):
        for item in value.values() if depth else ():
            yield from tensors_in(item, depth - 1)


_COLLECTIONS = (list, tuple, set, frozenset)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's warnings about fakes, and what the step prints: failing on fakes is an expected result."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _cached_results_forgotten(root: nn.Module) -> Iterator[None]:
    """Clear, at the end of this context, each ``lru_cache`` in the model's code that was filled in it with fakes."""
    before = [(cached, cached.cache_info().currsize) for cached in _caches(root)]
    try:
        yield
    finally:
        for cached, size in before:
            if cached.cache_info().currsize != size:
                cached.cache_clear()


def _caches(root: nn.Module) -> list[Any]:
    """Return the functions decorated with ``lru_cache`` in the classes of the modules and in their Python modules."""
    classes = {cls for module in root.modules() for cls in type(module).__mro__}
    files = {cls.__module__ for cls in classes} - {"builtins"}
    places = [*map(vars, classes), *(vars(sys.modules[name]) for name in files if name in sys.modules)]
    found: dict[int, Any] = {}
    for place in places:
        for value in list(place.values()):
            function = getattr(value, "__func__", value)  # This unwraps static and class methods.
            cells = getattr(function, "__closure__", None) or ()
            for candidate in (function, *(cell.cell_contents for cell in cells if _is_filled(cell))):
                if isinstance(candidate, _CACHED):
                    found[id(candidate)] = candidate
    return list(found.values())


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading an empty cell raises
    except ValueError:
        return False
    return True


def _swap_in_fakes(root: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
    def fake(tensor: Tensor) -> Tensor:
        with mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    for places in tensor_places(root).values():  # All places of a tied parameter get the same fake.
        container, key = places[0]
        put(fake(container[key]), places)


@contextmanager
def _observed(root: nn.Module, observer: Observer) -> Iterator[None]:
    handles = []
    for name, module in root.named_modules():
        if module is root:
            continue

        def on_call(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            observer.on_call(name, module, args, kwargs)

        def on_return(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            observer.on_return(name, module, args, kwargs, output)

        handles.append(module.register_forward_pre_hook(on_call, with_kwargs=True))
        handles.append(module.register_forward_hook(on_return, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def restored(root: nn.Module, others: Iterable[Any] = ()) -> Iterator[None]:
    """Restore, at the end of this context, all attributes, the contents of containers, and the states of generators.

    Args:
        root: The module whose attributes, and those of the modules in it, are restored.
        others: Further containers and objects whose contents are restored.
    """
    saved = [(module, dict(vars(module))) for module in root.modules()]
    generators = [(generator, get_state(generator)) for _, generator in own_generators(root)]
    contents: dict[int, tuple[Any, list[Any]]] = {}
    packages = packages_of(root)
    for _, attributes in saved:
        for value in attributes.values():
            _keep(value, contents, packages)
    for value in others:
        _keep(value, contents, packages)
    try:
        yield
    finally:
        for generator, state in generators:
            set_state(generator, state)
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)
        for value, items in contents.values():
            set_items(value, items)


def _keep(value: Any, contents: dict[int, tuple[Any, list[Any]]], packages: frozenset[str]) -> None:
    """Record the items of ``value``, and of all containers and objects nested in it, in ``contents``, by id."""
    if id(value) in contents:
        return
    for item in value if isinstance(value, tuple) else ():  # The items of dicts are tuples, too.
        _keep(item, contents, packages)
    items = items_of(value, packages)
    if items is None:
        return
    contents[id(value)] = (value, items)
    for item in items:
        _keep(item, contents, packages)
