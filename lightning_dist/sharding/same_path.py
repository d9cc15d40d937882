"""Check that ranks which communicate with each other run the same parts of the model.

Without it, a rank that skips a block would be given another block's weights, or the backend would end the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

__all__ = ["RanksDivergeError", "SamePath"]

Action = Literal["gather", "reduce", "end"]

_ACTIONS: tuple[Action, ...] = ("gather", "reduce", "end")


class RanksDivergeError(RuntimeError):
    """Ranks that communicate with each other run different parts of the model."""


class SamePath:
    """Compare what ranks are about to do with which unit.

    Args:
        names: The names of the units.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.is_off = False

    def check(self, action: Action, unit: int, group: dist.ProcessGroup) -> None:
        """Compare with the other ranks. A collective over ``group``.

        Args:
            action: What this rank is about to do.
            unit: The index of the unit; of no meaning at the end of a forward or a backward.
            group: The ranks that are to do the same.

        Raises:
            RanksDivergeError: On all ranks of ``group``, if one is about to do something else.
        """
        if self.is_off or group.size() == 1:
            return
        mine = torch.tensor([_ACTIONS.index(action), unit])
        of_all = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(of_all, mine, group)
        found = [theirs.tolist() for theirs in of_all]
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                ranks = dist.get_process_group_ranks(group)
                raise RanksDivergeError(
                    f"Ranks took different paths through the model in this step: rank {ranks[0]} is about to"
                    f" {self._described(*found[0])}, and rank {ranks[rank]} to {self._described(*theirs)}. All ranks"
                    " must run the same blocks in the same order: let what decides it be the same on all of them, such"
                    " as a torch.Generator that is seeded with trainer.global_step."
                )

    def _described(self, action: int, unit: int) -> str:
        if _ACTIONS[action] == "end":
            return "end the forward or the backward"
        return f"{_ACTIONS[action]} {'the gradients of ' if _ACTIONS[action] == 'reduce' else ''}{self._names[unit]}"
