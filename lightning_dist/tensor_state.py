"""Tell tensors without values on this rank apart: those of other ranks, and those that are not initialised yet.

Both are on the meta device, but never at the same time. Until a module has been made parallel, a tensor there has no
values yet. From then on, :mod:`lightning_dist.initialization` has left none of these, and a tensor there belongs to
other ranks, such as those of another pipeline stage: this rank knows its name, shape and dtype.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["is_remote", "is_uninitialized"]


def is_remote(tensor: Tensor) -> bool:
    """Return whether only other ranks have the values of ``tensor``, which is of a module that was made parallel.

    The module's state dicts, gradients and optimizer states are meant as well.
    """
    return tensor.is_meta


def is_uninitialized(tensor: Tensor) -> bool:
    """Return whether ``tensor``, of a module that is not parallel yet, has no values."""
    return tensor.is_meta
