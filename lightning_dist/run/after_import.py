"""Call a function as soon as another package has been imported, without importing it.

Importing torch and Lightning takes seconds, which a program should only wait for if it uses them. What this package
changes in them must be in effect wherever they are used, though, in whatever order a program imports the packages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["call_after_import"]


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Call ``function`` now if the module ``name`` is imported, and otherwise once, right after it is.

    The call happens inside of the module's import, whose error it becomes if it raises. If it imports a module of this
    package, no import of that module may be under way, which would then be incomplete.

    Args:
        name: Full name of the module.
        function: Function to call; calling it again must be safe, because a program may reload this package.
    """
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(MetaPathFinder):
    """Find one module by the other finders, and let its loader call a function after it has executed the module."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: object) -> None:
        """Replace a method of this loader object until it is called, so that the module keeps an ordinary loader."""
        execute = loader.exec_module  # type: ignore[attr-defined]

        def execute_and_call(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[attr-defined]
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._function()

        loader.exec_module = execute_and_call  # type: ignore[attr-defined]
