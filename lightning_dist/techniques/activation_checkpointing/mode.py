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
        every: ``kind`` applies to every ``every``-th block; the other blocks keep their activations.
        budget: Largest fraction of the blocks that keep their activations, from 0 to 1; these are spread evenly, and
            ``kind`` applies to the others.
    """

    kind: Kind = "none"
    every: int = 1
    budget: float = 0.0

    def __bool__(self) -> bool:
        return self.kind != "none"

    def chooses(self, index: int) -> bool:
        """Return whether ``kind`` applies to the block with the index ``index`` in the model, counted from 0."""
        if self.every > 1:
            return index % self.every == self.every - 1
        # At most the budget is kept of the first blocks, however many these are.
        return self._num_kept(index + 1) == self._num_kept(index)

    def _num_kept(self, num_blocks: int) -> int:
        return int(num_blocks * self.budget + 1e-6)  # Products such as 10 * 0.3 are rounded.
