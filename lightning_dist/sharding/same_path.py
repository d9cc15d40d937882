"""Check that ranks which communicate with each other run the same parts of the model.

Without this check, a rank that skips a block would receive another block's weights, or the backend would end the
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

__all__ = ["RanksDivergeError", "SamePath"]

Action = Literal["gather", "reduce", "end"]

_ACTIONS: tuple[Action, ...] = ("gather", "reduce", "end")


class RanksDivergeError(RuntimeError):
    """Report that ranks which communicate with each other run different parts of the model."""


class SamePath:
    """Compare between ranks which action on which unit they are about to take.

    Args:
        names: Names of the units, in the order of their indices.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.is_off = False

    def check(self, action: Action, unit: int, group: dist.ProcessGroup) -> None:
        """Compare this rank's next action with that of the other ranks. This is a collective over ``group``.

        Args:
            action: The next action: gather a unit's parameters, reduce its gradients, or end a forward or backward.
            unit: Index of the unit; the error does not show it at the end of a forward or backward.
            group: Process group of the ranks that must take the same actions.

        Raises:
            RanksDivergeError: On all ranks of ``group``, if their actions or units differ.
        """
        if self.is_off or group.size() == 1:
            return
        mine = unit * len(_ACTIONS) + _ACTIONS.index(action)
        extremes = torch.tensor([mine, -mine])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)  # It takes less time than an all-gather.
        highest, negated_lowest = extremes.tolist()
        if highest != -negated_lowest:
            self._raise(mine, group)

    def _raise(self, mine: int, group: dist.ProcessGroup) -> NoReturn:
        """Raise an error that names two ranks with different actions. This is a collective over ``group``."""
        found: list[int] = [0] * group.size()
        dist.all_gather_object(found, mine, group)
        other = next(rank for rank, theirs in enumerate(found) if theirs != found[0])
        ranks = dist.get_process_group_ranks(group)
        raise RanksDivergeError(
            f"Ranks took different paths through the model in this step: rank {ranks[0]} is about to"
            f" {self._described(found[0])}, and rank {ranks[other]} to {self._described(found[other])}. All ranks"
            " must run the same blocks in the same order: base the choice of blocks on something that is the"
            " same on all of them, such as a torch.Generator seeded with trainer.global_step."
        )

    def _described(self, number: int) -> str:
        unit, place = divmod(number, len(_ACTIONS))
        action = _ACTIONS[place]
        if action == "end":
            return "end the forward or the backward"
        return f"{action} {'the gradients of ' if action == 'reduce' else ''}{self._names[unit]}"
