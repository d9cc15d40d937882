"""Find out why a tensor has no values on this rank: only other ranks have them, or it is not initialised yet.

Both kinds are on the meta device, but never at the same time. Until a module has been made parallel, a tensor there is
not initialised yet. From then on, :mod:`lightning_dist.model.initialization` has initialised all tensors of this rank,
and a tensor on the meta device belongs to other ranks, such as those of another pipeline stage.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["is_remote", "is_uninitialized"]


def is_remote(tensor: Tensor) -> bool:
    """Return whether only other ranks have the values of ``tensor``, which belongs to a module that is parallel.

    The tensor may also come from the module's state dict or an optimizer's state, or be a gradient.
    """
    return tensor.is_meta


def is_uninitialized(tensor: Tensor) -> bool:
    """Return whether ``tensor``, which belongs to a module that is not parallel yet, is not initialised."""
    return tensor.is_meta
