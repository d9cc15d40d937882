"""What is done to the forward of each block: recomputed in the backward, compiled.

A block keeps its class, its names and its hooks; only ``forward`` is replaced, on the instance. The hooks run once,
before and after it, also where it is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

__all__ = ["compile_block", "recompute_block", "rerun_in_place"]

InPlace = Callable[[], Callable[[], AbstractContextManager[None]]]
"""Is called when a forward begins, and gives what to enter around it, and around each time that it is run again."""


def compile_block(block: nn.Module, backend: str) -> None:
    """Let ``block`` run through ``torch.compile``, its blocks one by one: what lies between them stays as it is.

    Args:
        block: A block.
        backend: torch.compile's, such as ``"inductor"``.
    """
    block.forward = torch.compile(block.forward, backend=backend)


def recompute_block(block: nn.Module, in_place: InPlace = lambda: nullcontext) -> None:
    """Keep none of the activations of ``block`` for the backward, but run it again (Chen et al., 2016).

    Args:
        block: A block.
        in_place: Puts the parameters in their place that it runs with.
    """
    forward = block.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        entered = in_place()

        def run(*args: Any, **kwargs: Any) -> Any:
            with entered():
                return forward(*args, **kwargs)

        # To its end: what hooks inside have begun, they also end.
        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed


def rerun_in_place(block: nn.Module, in_place: InPlace) -> None:
    """Let the model itself run ``block`` again in the backward, as Hugging Face's gradient checkpointing does.

    Args:
        block: A block.
        in_place: Puts the parameters in their place that it runs with.
    """
    forward = block.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with in_place()():
            return forward(*args, **kwargs)

    block.forward = run
