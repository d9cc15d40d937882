"""Choose which activations are kept for the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CheckpointingMode", "Kind"]

Kind = Literal["none", "full", "selective", "offload"]


@dataclass(frozen=True)
class CheckpointingMode:
    """Say what is done with the activations inside of blocks.

    Args:
        kind: ``"none"``: they are kept. ``"full"``: they are computed again in the backward. ``"selective"``: the same,
            but the results of attention and of every second matrix product are kept. ``"offload"``: they are kept in
            the memory of the CPU.
        fraction: The fraction of the blocks of which ``kind`` is true, above 0 and at most 1; these blocks are spread
            evenly over the model.
        text: The argument as the user wrote it.
    """

    kind: Kind = "none"
    fraction: float = 1.0
    text: str = "none"

    def __bool__(self) -> bool:
        return self.kind != "none"

    def chooses(self, index: int) -> bool:
        """Return whether the block with the number ``index``, counted from 0, is among the fraction of the blocks."""
        # A hundredth of a block is added, because fractions such as 1/3 are rounded.
        return int((index + 1) * self.fraction + 0.01) > int(index * self.fraction + 0.01)
