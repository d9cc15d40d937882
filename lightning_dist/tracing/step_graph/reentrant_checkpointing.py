"""Support reentrant activation checkpointing in the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

__all__ = ["checkpointing_without_reentry"]


@contextmanager
def checkpointing_without_reentry() -> Iterator[None]:
    """Run ``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`` in this context as ``use_reentrant=False``.

    Values and gradients are the same. The reentrant variant runs the function without gradients and hides its autograd
    graph, so that gradients would not reach the tensors that a stage sends from inside a checkpointed function.
    """
    own = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _WithoutReentry  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = own  # type: ignore[misc]


class _WithoutReentry:
    """Replace the autograd function of the reentrant variant."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run ``function`` on ``args`` without the reentrant variant; it is recomputed in the backward.

        Args:
            function: Function that the user's code checkpoints.
            preserve_rng_state: Whether the recomputation draws the same random numbers as the forward.
            *args: Positional arguments of ``function``.
        """
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
