"""Represent which modules of a model compute tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TilingError", "TilingPlan"]


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
