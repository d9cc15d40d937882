"""Let a module run again in the backward with the state with which a forward of it began."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_dist._compat import hooks_around_forward, own_buffers, own_parameters

__all__ = ["Begin", "StateOfForward", "held_parameters", "together"]

Begin = Callable[[], Callable[[], AbstractContextManager[None]]]
"""A function that is called when a forward begins. It returns a function whose context is entered around that forward,
and around each time that it runs again."""


def together(begins: Sequence[Begin]) -> Begin:
    """Return a function whose contexts are those of ``begins``, entered in their order."""

    def begin() -> Callable[[], AbstractContextManager[None]]:
        enter = [begin() for begin in begins]

        @contextmanager
        def context() -> Iterator[None]:
            with ExitStack() as stack:
                for one in enter:
                    stack.enter_context(one())
                yield

        return context

    return begin


class StateOfForward:
    """Let reruns of ``module`` find what a forward of it has found, whatever the step has changed in between.

    A step may call ``eval()`` and ``train()``, assign an attribute or a buffer, freeze parameters, and register or
    remove hooks between two forwards, or between a forward and its backward. The values themselves are not copied: a
    change within a tensor or a container is not undone.

    Args:
        module: The module, whose submodules count as well.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._last: list[dict[Any, Any]] = []
        """What the last forward has found, which the next one shares as far as it is the same."""

    def begin(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that returns contexts: the first one for a forward, the others for its reruns."""
        found: list[dict[Any, Any]] = []
        requires_grad: dict[tuple[nn.Module, str], bool] = {}

        @contextmanager
        def context() -> Iterator[None]:
            if not found:
                found.extend(self._found())
                requires_grad.update(
                    {place: param.requires_grad for module in self._modules for place, param in _own(module)}
                )
                yield
                return
            now = [_set(values, wanted) for values, wanted in zip(self._dictionaries(), found, strict=True)]
            changed = [
                param
                for module in self._modules
                for place, param in _own(module)
                if param.is_leaf and param.requires_grad != requires_grad.get(place, param.requires_grad)
            ]
            for param in changed:
                param.requires_grad_(not param.requires_grad)
            try:
                yield
            finally:
                for param in changed:
                    param.requires_grad_(not param.requires_grad)
                for values, wanted in zip(self._dictionaries(), now, strict=True):
                    _set(values, wanted)

        return context

    def _dictionaries(self) -> Iterator[dict[Any, Any]]:
        """Yield the dictionaries in which the modules hold their attributes, their buffers and their hooks."""
        for module in self._modules:
            yield vars(module)
            yield own_buffers(module)
            yield from hooks_around_forward(module)

    def _found(self) -> list[dict[Any, Any]]:
        last = self._last or [{} for _ in self._dictionaries()]
        self._last = [
            kept if _is_same(values, kept) else dict(values)
            for values, kept in zip(self._dictionaries(), last, strict=True)
        ]
        return self._last


def held_parameters(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    """Yield what ``module`` and its submodules hold as parameters, by the module that holds it and its name in it."""
    for owner in module.modules():
        yield from _own(owner)


def _own(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    for name, param in own_parameters(module).items():
        if param is not None:
            yield (module, name), param


def _is_same(values: Mapping[Any, Any], others: Mapping[Any, Any]) -> bool:
    return list(values) == list(others) and all(map(is_, values.values(), others.values()))


def _set(values: dict[Any, Any], wanted: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Let ``values`` have the items of ``wanted`` in their order, in which hooks run, and return what it had."""
    if _is_same(values, wanted):
        return wanted
    earlier = dict(values)
    values.clear()
    values.update(wanted)
    return earlier
