"""Compile each block by ``torch.compile``; code between the blocks is not compiled.

A block keeps its class, its names and its hooks. Only ``forward`` is replaced, on the instance.
"""

from __future__ import annotations

import torch

from lightning_dist._compat import compile_backwards_without_autocast
from lightning_dist.technique import Rows, Technique
from lightning_dist.units import Unit

__all__ = ["Compilation"]


class Compilation(Technique):
    """Compile each block separately by ``torch.compile``.

    Args:
        backend: The backend of torch.compile, such as ``"inductor"``.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        compile_backwards_without_autocast()

    def prepare_unit(self, unit: Unit) -> None:
        """Compile the forwards of the unit's modules if it is a block."""
        for block in unit.modules if unit.kind == "block" else ():
            block.forward = torch.compile(block.forward, backend=self._backend)

    def table_rows(self) -> Rows:
        """Return a row that names the backend."""
        yield "compiled", f"blocks ({self._backend})"
