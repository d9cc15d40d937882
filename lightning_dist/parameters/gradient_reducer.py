"""Define the interface of objects that average gradients over replicas in place of an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["GradientReducer", "LocalGradient", "Reduction"]


class LocalGradient(NamedTuple):
    """Hold a parameter's gradient on this rank.

    Args:
        name: Full name of the parameter.
        value: This rank's gradient, or its shard of it, which is a view of the tensor that is reduced.
    """

    name: str
    value: Tensor


class Reduction(Protocol):
    """Represent a reduction that may still be running."""

    def wait(self) -> object:
        """Wait until the reduction has ended, and raise its error if it failed."""


class GradientReducer(Protocol):
    """Average gradients over the replicas in place of an all-reduce."""

    def reduce(self, flat: Tensor, gradients: Sequence[LocalGradient]) -> Reduction:
        """Begin to replace ``gradients`` by their means over the replicas. This is a collective over the replicas.

        Args:
            flat: The tensor of one dimension whose views the gradients are. It must not be changed before the reduction
                has ended.
            gradients: The gradients in the same order on all replicas.

        Returns:
            The reduction, for which the caller waits before it reads ``flat``.
        """

    def reduce_later(self, flat: Tensor, gradients: Sequence[LocalGradient]) -> None:
        """Begin the same reduction; it has ended when the ``after_backward`` of its technique returns."""

    def discard(self, gradients: Sequence[LocalGradient]) -> None:
        """Let a later reduction include the means that ``gradients`` hold, because the caller does not use them."""

    def forget(self, names: Sequence[str]) -> None:
        """Drop what earlier reductions have kept about some parameters, because their gradients are reduced again."""
