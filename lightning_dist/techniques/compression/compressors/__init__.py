"""Implement gradient compressors, one per file, and find them by name.

A new compressor is a new file in this folder with a subclass of :class:`~.compressor.Compressor`; its name in a
configuration is the name of the class in lower case.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import iter_modules

from lightning_dist.techniques.compression.compressor import COMPRESSORS, Compressor

__all__ = ["COMPRESSORS"]


def _find() -> dict[str, type[Compressor]]:
    """Return the classes of compressors in this folder by the names of configurations."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    found = [kind for kind in classes if issubclass(kind, Compressor) and not inspect.isabstract(kind)]
    return {kind.__name__.lower(): kind for kind in sorted(found, key=lambda kind: kind.__name__)}


COMPRESSORS.update(_find())
