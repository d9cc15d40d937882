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
        every: ``kind`` is true of every so many blocks.
        budget: Fraction of the blocks of which ``kind`` is not true, from 0 to 1; these are spread evenly.
    """

    kind: Kind = "none"
    every: int = 1
    budget: float = 0.0

    def __bool__(self) -> bool:
        return self.kind != "none"

    def chooses(self, index: int) -> bool:
        """Return whether ``kind`` is true of the block with the number ``index`` of the model, counted from 0."""
        if self.every > 1:
            return index % self.every == self.every - 1
        # At most the budget is kept of the first blocks, however many these are.
        return self._num_kept(index + 1) == self._num_kept(index)

    def _num_kept(self, num_blocks: int) -> int:
        return int(num_blocks * self.budget + 1e-6)  # Products such as 10 * 0.3 are rounded.
