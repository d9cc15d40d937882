"""Represent which modules of a model compute tile by tile, and the options that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["TilingConfig", "TilingError", "TilingPlan"]


class TilingError(ValueError):
    """Report that nothing in a model can be computed tile by tile, or that a loss cannot."""


@dataclass(frozen=True)
class TilingPlan:
    """Name the modules that compute tile by tile.

    Args:
        mlps: Full names of the modules inside of blocks.
        heads: Full names of the modules that compute logits for ``F.cross_entropy``.
    """

    mlps: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class TilingConfig:
    """Configure what is computed tile by tile.

    Args:
        mlp: Number of tokens of a sequence that an MLP of a block computes at a time; None: all.
        loss: Number of tokens of a sequence for which logits and loss are computed at a time; None: all.
        step: Function that runs one step of the module on fake tensors; None: no step can be run (see ``why_no_step``).
        why_no_step: The reason why ``step`` is None.
        planned: The plan of the module that this one is a copy of; None: find a plan.

    Raises:
        ValueError: If a number of tokens is not positive.
    """

    mlp: int | None = None
    loss: int | None = None
    step: Callable[..., Any] | None = None
    why_no_step: str = "no step is known"
    planned: TilingPlan | None = None

    def __post_init__(self) -> None:
        for name, size in (("tiled_mlp", self.mlp), ("tiled_loss", self.loss)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f"{name}={size!r} must be a number of tokens of at least 1, such as 2048, or None.")

    def __bool__(self) -> bool:
        """Return whether anything is computed tile by tile."""
        return self.mlp is not None or self.loss is not None
