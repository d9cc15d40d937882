"""Check that ranks which communicate with each other run the same parts of the model.

Without this check, a rank that skips a block would receive another block's weights, or the backend would end the
process.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.mesh.collectives import Transfer, begin_exchange, exchange

__all__ = ["RanksDivergeError", "SamePath"]

Action = Literal["gather", "reduce", "end"]

_ACTIONS: tuple[Action, ...] = ("gather", "reduce", "end")

_FIRST_TAG = 1 << 24
"""Tag of the messages with the numbers of actions, which no user's message is likely to have."""

_MARK_BYTES = 8
"""Number of random bytes that are written to the end of a receiver's memory, to notice a message that is too short."""


class _Step(NamedTuple):
    """Describe what a rank does in one exchange.

    Args:
        action: Index of the action in ``_ACTIONS``.
        unit: Index of the unit.
        num_bytes: Size of the message to each other rank.
    """

    action: int
    unit: int
    num_bytes: int

    @property
    def tag(self) -> int:
        """Return the tag of the messages with the data, so that no rank receives those of another action."""
        return _FIRST_TAG + 1 + self.unit * len(_ACTIONS) + self.action


_NONE = _Step(-1, -1, -1)
"""What stands for an action before the first one."""


class RanksDivergeError(RuntimeError):
    """Report that ranks which communicate with each other run different parts of the model."""


class SamePath:
    """Exchange data between ranks, and check that they take the same actions on the same units, in the same order.

    A message of its own for this check would take longer than the data of a small unit. Messages with data therefore
    carry the check: the action that followed the last two actions before is expected to follow them again, on all
    ranks, and the data of the expected action are exchanged directly. A rank that is about to take another action knows
    what the others wait for, and sends them a message that is too short. All ranks then tell each other their actions.

    Several expected actions may be under way at the same time. Ranks wait for them in the order in which they began, so
    that a rank which took another action finds all others at the action that it did not take.

    Args:
        names: Names of the units, in the order of their indices.
        under_way: The exchanges that have begun and not ended. Objects whose groups have ranks in common share it.
    """

    def __init__(self, names: Sequence[str], under_way: deque[Transfer] | None = None) -> None:
        self._names = names
        self._under_way = deque[Transfer]() if under_way is None else under_way
        self._last: tuple[_Step, _Step] = (_NONE, _NONE)
        """The last two actions of all ranks."""
        self._next: dict[tuple[_Step, _Step], _Step] = {}
        """For two actions, the action that followed them the last time. It is the same on all ranks."""
        self._random = random.Random()
        self._error: RanksDivergeError | None = None
        self._abandoned: list[Transfer] = []

    def begin(
        self, action: Action, unit: int, received: Tensor, sent: Sequence[Tensor], group: dist.ProcessGroup
    ) -> Transfer:
        """Begin to exchange the data of an action. This is a collective over ``group``.

        Args:
            action: The action: gather a unit's parameters, reduce its gradients, or end a forward or backward.
            unit: Index of the unit; the error does not show it at the end of a forward or backward.
            received: As for :func:`lightning_dist.mesh.collectives.begin_exchange`.
            sent: As for :func:`lightning_dist.mesh.collectives.begin_exchange`; all are of the same size.
            group: Process group of the ranks, which must be the same one in all calls, and use gloo.

        Returns:
            The exchange. Waiting for it first waits for those that have begun before.

        Raises:
            RanksDivergeError: Here or when the exchange is waited for, on all ranks of ``group``, if their actions,
                units or sizes differ.
        """
        if group.size() == 1:
            return Transfer(lambda: None)
        if self._error is not None:  # Messages of the actions that were under way then may still arrive.
            raise self._error
        step = _Step(_ACTIONS.index(action), unit, received.shape[1] * received.itemsize)
        expected = self._next.get(self._last)
        if step == expected:
            transfer = self._begin_expected(step, received, sent, group)
        else:
            self._finish()
            if expected is not None:
                self._send_too_little(expected, group)
            self._compare(step, group)
            exchange(received, sent, group, step.tag)
            transfer = Transfer(lambda: None)
        if step.num_bytes >= 2 * _MARK_BYTES:
            self._next[self._last] = step
        else:  # A message that is too short would overwrite the mark.
            self._next.pop(self._last, None)
        self._last = (self._last[1], step)
        return transfer

    def exchange(
        self, action: Action, unit: int, received: Tensor, sent: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        """Exchange the data of an action as :meth:`begin` does, and wait for them."""
        self.begin(action, unit, received, sent, group).wait()

    def _begin_expected(
        self, step: _Step, received: Tensor, sent: Sequence[Tensor], group: dist.ProcessGroup
    ) -> Transfer:
        """Begin to exchange the data of the expected action, whose end checks that all ranks have taken it."""
        mark = torch.frombuffer(bytearray(self._random.randbytes(_MARK_BYTES)), dtype=torch.uint8)
        rows = received.view(torch.uint8)
        ends = [rows[rank, -_MARK_BYTES:] for rank in range(group.size()) if rank != group.rank()]
        for end in ends:
            end.copy_(mark)
        messages = begin_exchange(received, sent, group, step.tag)

        def finish() -> None:
            messages.wait()
            if any(torch.equal(end, mark) for end in ends):
                self._compare(step, group)

        transfer = Transfer(finish)
        self._under_way.append(transfer)
        return Transfer(partial(self._finish, transfer))

    def _finish(self, last: Transfer | None = None) -> None:
        """Wait for the exchanges that are under way, in their order, up to ``last``; None: for all of them."""
        while self._under_way and (last is None or last in self._under_way):
            self._under_way.popleft().wait()

    def _send_too_little(self, expected: _Step, group: dist.ProcessGroup) -> None:
        """Take part in the exchange that other ranks expect, with messages of one byte."""
        unused = torch.empty(group.size(), expected.num_bytes, dtype=torch.uint8)
        exchange(unused, [torch.zeros(1, dtype=torch.uint8)] * group.size(), group, expected.tag)

    def _compare(self, mine: _Step, group: dist.ProcessGroup) -> None:
        """Raise an error that names two ranks with different actions, if there are any."""
        numbers = torch.tensor([mine] * group.size())
        exchange(numbers, list(numbers.clone()), group, _FIRST_TAG)
        found = [_Step(*row) for row in numbers.tolist()]
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if other is None:
            return
        self._abandoned = [*self._under_way]  # Nobody may send what they wait for, but it may still arrive.
        self._under_way.clear()
        ranks = dist.get_process_group_ranks(group)
        first, second = (self._described(step) for step in (found[0], found[other]))
        self._error = RanksDivergeError(
            f"Ranks took different paths through the model in this step: rank {ranks[0]} is about to {first}, and rank"
            f" {ranks[other]} to {second}. All ranks must run the same blocks in the same order, and train the same"
            " parameters: base the choice of blocks on something that is the same on all of them, such as a"
            " torch.Generator seeded with trainer.global_step."
        )
        raise self._error

    def _described(self, step: _Step) -> str:
        action = _ACTIONS[step.action]
        if action == "end":
            return f"end the forward or the backward ({step.num_bytes} bytes)"
        what = "the gradients of " if action == "reduce" else ""
        return f"{action} {what}{self._names[step.unit]} ({step.num_bytes} bytes)"
