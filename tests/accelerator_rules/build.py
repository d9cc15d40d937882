"""Compile the simulated accelerator once per content of its sources."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["compiled", "reason_not_to_compile"]

_SOURCES = Path(__file__).parent / "device"
_NAME = "simulated_device"
_VARIABLE = "LIGHTNING_DIST_TESTS_DEVICE"
"""Environment variable with the library, so that all workers of a session use the one that was compiled first."""


def reason_not_to_compile() -> str | None:
    """Return why the device cannot be compiled here; None: it can, or it is compiled already."""
    if _library().exists():
        return None
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"the simulated accelerator needs a C++ compiler, and there is no {compiler}"
    if shutil.which("ninja") is None and not (Path(sys.executable).parent / "ninja").exists():
        return "the simulated accelerator is compiled by ninja, which is not installed"
    return None


@cache
def compiled() -> ModuleType:
    """Return the extension with the device, and compile it first if it is not in the user's cache folder.

    Raises:
        RuntimeError: If it is not compiled and cannot be.
    """
    if reason := reason_not_to_compile():
        raise RuntimeError(reason)
    library = _library()
    if not library.exists():
        from torch.utils import cpp_extension

        library.parent.mkdir(parents=True, exist_ok=True)
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
        print(f"compiling the simulated accelerator into {library.parent}, which takes a minute", file=sys.stderr)
        sources = [str(path) for path in sorted(_SOURCES.glob("*.cpp"))]
        # The function takes a lock, so that processes that start at the same time compile once.
        cpp_extension.load(
            _NAME, sources, extra_cflags=["-O1", "-g0"], build_directory=str(library.parent), is_python_module=False
        )
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    os.environ[_VARIABLE] = str(library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _library() -> Path:
    if path := os.environ.get(_VARIABLE):
        return Path(path)
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return folder / "lightning-dist-tests" / f"{_NAME}-{digest.hexdigest()[:16]}" / f"{_NAME}.so"
