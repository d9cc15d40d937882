"""Compilation of each block by ``torch.compile``; what lies between the blocks stays as it is.

A block keeps its class, its names and its hooks. Only ``forward`` is replaced, on the instance.
"""

from __future__ import annotations

import torch

from lightning_dist.technique import Rows, Technique
from lightning_dist.units import Unit

__all__ = ["Compilation"]


class Compilation(Technique):
    """Let blocks run through ``torch.compile``, one by one.

    Args:
        backend: The backend of torch.compile, such as ``"inductor"``.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def prepare_unit(self, unit: Unit) -> None:
        """Compile the forwards of a block's modules."""
        for block in unit.modules if unit.kind == "block" else ():
            block.forward = torch.compile(block.forward, backend=self._backend)

    def table_rows(self) -> Rows:
        """Return a row that names the backend."""
        yield "compiled", f"blocks ({self._backend})"
