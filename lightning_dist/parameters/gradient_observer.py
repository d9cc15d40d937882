"""Define the interface of objects that look at each rank's own gradients before these are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightning_dist.parameters.gradient_reducer import LocalGradient

__all__ = ["GradientObserver"]


class GradientObserver(Protocol):
    """Look at this rank's gradients, which are of its own part of the batch alone."""

    def observe(self, gradients: Sequence[LocalGradient], divisor: float) -> None:
        """Look at gradients that are about to be averaged over the ranks with different parts of the batch.

        A call replaces what an earlier call of the same backward was given for the same parameters, because their
        reduction begins again.

        Args:
            gradients: This rank's gradients, with those that an accumulation has added up. They are whole, or this
                rank's parts if layers are split over ``tp``. They must not be changed, and may be changed later.
            divisor: Number by which the gradients have been divided already.
        """

    def miss(self, name: str) -> None:
        """Take note that the gradient of a parameter is averaged by an operation that shows it to nobody.

        Args:
            name: Full name of the parameter.
        """
