"""Activation checkpointing: a block's activations are computed again in the backward (Chen et al., 2016).

A block keeps its class, its names and its hooks. Only ``forward`` is replaced, on the instance, so that the hooks run
once, before and after it, also where it runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_dist.technique import Parallel, Rows, Technique, bound
from lightning_dist.units import Unit

__all__ = ["ActivationCheckpointing"]


class ActivationCheckpointing(Technique):
    """Keep none of the activations of blocks for the backward, but run the blocks again."""

    def attach(self, parallel: Parallel) -> None:
        """Take what other techniques need around a block that runs again."""
        self._around_rerun = bound(parallel.techniques, "around_rerun")

    def prepare_unit(self, unit: Unit) -> None:
        """Replace the forwards of a block's modules."""
        for block in unit.modules if unit.kind == "block" else ():
            _recompute(block, [around_rerun(unit, block) for around_rerun in self._around_rerun])

    def table_rows(self) -> Rows:
        """Return a row that tells what is computed again."""
        yield "recomputed", "activations of blocks, in the backward"


def _recompute(block: nn.Module, around: Sequence[Callable[[], Callable[[], AbstractContextManager[None]]]]) -> None:
    """Run ``block`` again in the backward.

    Args:
        block: A block, whose forward is replaced.
        around: Functions that are called when a forward begins. Each returns a function whose context is entered around
            that forward, and around each time that it runs again.
    """
    forward = block.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        contexts = [begin() for begin in around]

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                return forward(*args, **kwargs)

        # To its end: what hooks inside have begun, they also end.
        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed
