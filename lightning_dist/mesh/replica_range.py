"""Say between which numbers of replicas an elastic run trains, and by which variables a launcher passes this on.

The module imports no torch, so that the command can use it at once.
"""

from __future__ import annotations

import os
import re
from math import gcd, lcm
from typing import NamedTuple

__all__ = ["COORDINATOR", "RANGE", "REPLICA", "ReplicaRange"]

RANGE = "LIGHTNING_DIST_ELASTIC"
"""The environment variable that holds the smallest and the largest number of replicas, as ``MIN:MAX``."""

REPLICA = "LIGHTNING_DIST_REPLICA"
"""The environment variable that holds the index of this process's replica, from 0."""

COORDINATOR = "TORCHFT_LIGHTHOUSE"
"""The environment variable that holds the address of the coordinator; its name is torchft's."""


class ReplicaRange(NamedTuple):
    """Hold between which numbers of replicas a run trains."""

    smallest: int
    """The number of replicas below which the run waits."""

    largest: int
    """The number of replicas that the data are divided among."""

    @classmethod
    def parse(cls, text: str) -> ReplicaRange:
        """Return the range that ``text`` stands for, such as ``"2:3"``.

        Raises:
            ValueError: If it is no range, or has fewer than two replicas.
        """
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(
                f"elastic={text!r}: expected the smallest and the largest number of replicas, such as '2:3'."
            )
        if int(match[2]) == 1:
            raise ValueError(
                f"elastic={text!r}: one replica has no other that trains on while it is away. Give at least 2 as the"
                " largest number, or leave elastic out and use --max-restarts of lightning-dist launch."
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def divisor(self) -> int:
        """Return the number by which the batches of a step can be divided so that any number of replicas shares them.

        It divides those of each replica while all are there.
        """
        return lcm(*(number // gcd(number, self.largest) for number in range(self.smallest, self.largest + 1)))

    def num_batches(self, configured: int, num_members: int) -> int:
        """Return the number of batches of each replica in a step that has as many as a step of all replicas.

        Args:
            configured: Number of batches of each replica while all are there, a multiple of :attr:`divisor`.
            num_members: Number of replicas that take part in the step.
        """
        return configured * self.largest // num_members

    @classmethod
    def asked(cls, argument: str | None) -> ReplicaRange | None:
        """Return the range that the argument of a strategy, or else the launcher, asks for; None: none does.

        Raises:
            ValueError: As :meth:`parse`.
        """
        text = argument or os.environ.get(RANGE)
        return cls.parse(str(text)) if text else None

    def own_index(self) -> int:
        """Return the index of this process's replica, which the launcher has said.

        Raises:
            ValueError: If no launcher has said it, or it is out of range.
        """
        missing = [name for name in (REPLICA, COORDINATOR) if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"elastic='{self}', but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in the"
                f" environment. Start the run by lightning-dist launch --elastic {self} -- fit ..., which starts the"
                " coordinator and the replicas."
            )
        index = os.environ[REPLICA]
        if not index.isdecimal() or int(index) >= self.largest:
            raise ValueError(
                f"{REPLICA}={index!r} in the environment: expected the index of this replica, from 0 to"
                f" {self.largest - 1}."
            )
        return int(index)

    def __str__(self) -> str:
        """Return the text of which :meth:`parse` makes the range."""
        return f"{self.smallest}:{self.largest}"
