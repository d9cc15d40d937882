"""Activation checkpointing of the user's own around parts of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

__all__ = ["checkpointing_without_reentry"]


@contextmanager
def checkpointing_without_reentry() -> Iterator[None]:
    """Let ``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`` do as with ``use_reentrant=False`` inside.

    Values and gradients are the same. But the reentrant variant runs a part without gradients and keeps its graph to
    itself, so that what a stage hands on to the next would not be what the part's gradient comes back to.
    """
    own = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _WithoutReentry  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = own  # type: ignore[misc]


class _WithoutReentry:
    """Stand in for the autograd function of the reentrant variant."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run ``function`` on ``args``; it is run again in the backward."""
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
