"""A module as it was before it was spread, for a while: to follow a step of it once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn

from lightning_dist import _compat

__all__ = ["AsWritten"]

_CHANGED = ("forward", _compat.ROUTE)


class AsWritten:
    """Remembers what spreading changes of modules besides their tensors: forwards of their own; and leaves out hooks.

    Args:
        root: The user's module, before anything is done to it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._written: dict[nn.Module, dict[str, Any]] = {
            module: {key: copy(vars(module)[key]) for key in _CHANGED if key in vars(module)}
            for module in root.modules()
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the module is as it was."""
        kept = {module: dict(vars(module)) for module in self._written}
        try:
            for module, attributes in self._written.items():
                for key in _CHANGED:
                    vars(module).pop(key, None)
                vars(module).update({key: copy(value) for key, value in attributes.items()})
                _compat.leave_out_hooks(module)
            yield
        finally:
            for module, attributes in kept.items():
                vars(module).clear()
                vars(module).update(attributes)
