"""Compile each block by ``torch.compile``; code between the blocks is not compiled.

A block keeps its class, its names and its hooks. Only ``forward`` is replaced, on the instance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_dist._compat import compile_backwards_without_autocast
from lightning_dist.model.units import Unit
from lightning_dist.techniques.protocol import Rows, Technique

__all__ = ["Compilation", "CompileConfig"]


@dataclass(frozen=True)
class CompileConfig:
    """Configure how blocks are compiled.

    Args:
        backend: The backend of torch.compile, such as ``"inductor"``.
        mode: The mode of torch.compile, such as ``"reduce-overhead"``; None: torch's default.
    """

    backend: str = "inductor"
    mode: str | None = None

    @property
    def captures_graphs(self) -> bool:
        """Return whether compiled blocks run as CUDA graphs, whose results the next step overwrites."""
        return self.mode in ("reduce-overhead", "max-autotune") or self.backend == "cudagraphs"

    def __str__(self) -> str:
        return self.backend if self.mode is None else f"{self.backend}, {self.mode}"


class Compilation(Technique):
    """Compile each block separately by ``torch.compile``.

    Args:
        config: The backend and the mode of torch.compile.
    """

    def __init__(self, config: CompileConfig) -> None:
        self._config = config
        compile_backwards_without_autocast()

    def prepare_unit(self, unit: Unit) -> None:
        """Compile the forwards of the unit's modules if it is a block."""
        options = {} if self._config.mode is None else {"mode": self._config.mode}
        for block in unit.modules if unit.kind == "block" else ():
            block.forward = torch.compile(block.forward, backend=self._config.backend, **options)  # type: ignore[call-overload]

    def before_step(self) -> None:
        """Let CUDA graphs reuse the memory of the last step's results.

        Each block is a graph of its own. Without this, a block would begin a new step where no gradients are computed,
        and overwrite the result of the block before it.
        """
        if self._config.captures_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def table_rows(self) -> Rows:
        """Return a row that names the backend and the mode."""
        yield "compiled", f"blocks ({self._config})"
