"""Enter a context around the forwards of a module, by replacing its ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import nn

__all__ = ["enter_around_forward"]


def enter_around_forward(block: nn.Module, begin: Callable[[], Callable[[], AbstractContextManager[Any]]]) -> None:
    """Enter a context around each forward of ``block``, even if the user's own code recomputes it in a backward.

    Args:
        block: The block, whose ``forward`` is replaced on the instance.
        begin: Function from :meth:`~lightning_dist.techniques.protocol.Technique.around_rerun`: called when a forward
            begins, it returns a function that makes the context.
    """
    forward = block.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with begin()():
            return forward(*args, **kwargs)

    block.forward = run
