"""A module as it was before it was spread, for a while: to follow a step of it once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_dist import _compat

__all__ = ["OriginalModule"]


class _Absent:
    """The attribute does not exist."""


class OriginalModule:
    """Remembers what spreading changes of modules besides their tensors: forwards, numbers of features, hooks.

    Args:
        root: The user's module, before anything is done to it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._before = [(module, dict(vars(module))) for module in root.modules()]
        self._changed: list[tuple[nn.Module, dict[str, Any]]] = []

    def is_spread(self) -> None:
        """To be called when all has been done to the module: what differs now is what was changed."""
        for module, before in self._before:
            now = vars(module)
            changed = {
                key: before.get(key, _Absent)
                for key in before.keys() | now.keys()
                if before.get(key, _Absent) is not now.get(key, _Absent)
            }
            self._changed.append((module, changed))
        self._before.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the module is as it was."""
        kept = [(module, dict(vars(module))) for module, _ in self._changed]
        try:
            for module, attributes in self._changed:
                for key, value in attributes.items():
                    vars(module).pop(key, None)
                    if value is not _Absent:
                        vars(module)[key] = value
                _compat.leave_out_hooks(module)
            yield
        finally:
            for module, attributes in kept:
                vars(module).clear()
                vars(module).update(attributes)
