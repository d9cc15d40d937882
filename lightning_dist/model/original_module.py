"""Restore a module temporarily to its state before it was parallelized, to trace its step again or to copy it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_dist import _compat

__all__ = ["OriginalModule"]


class _Absent:
    """Mark an attribute that does not exist."""


class OriginalModule:
    """Remember the attributes of modules that parallelization changes: forwards, numbers of features, hooks.

    Args:
        root: The user's module, before it is changed in any way.
    """

    def __init__(self, root: nn.Module) -> None:
        self._before = [(module, dict(vars(module))) for module in root.modules()]
        self._changed: list[tuple[nn.Module, dict[str, Any]]] = []
        self._kept: object = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}

    def record_changes(self) -> None:
        """Record which attributes parallelization has changed. Call this once, after the module was parallelized."""
        for module, before in self._before:
            now = vars(module)
            changed = {
                key: before.get(key, _Absent)
                for key in before.keys() | now.keys()
                if before.get(key, _Absent) is not now.get(key, _Absent)
            }
            self._changed.append((module, changed))
        self._before.clear()

    def allow_copies(self, root: nn.Module, kept: object) -> None:
        """Let ``copy.deepcopy`` of ``root``, of which this rank has all tensors, make an ordinary module.

        Args:
            root: The user's module, which holds this object from then on.
            kept: An object that shall live as long as ``root``, and is in no copy of it.
        """
        self._kept = kept
        for module in root.modules():
            if "__deepcopy__" in vars(module):
                vars(module)["__deepcopy__"] = partial(self._copy, module)

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        with self.restored():
            for inner in module.modules():
                for key, value in list(vars(inner).items()):
                    if _compat.defining_module(value).startswith("lightning_dist."):
                        del vars(inner)[key]
            return copy.deepcopy(module, memo)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the original attributes for the time of this context."""
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
