"""Tell a Trainer that it is one rank of many, which nothing has started."""

from __future__ import annotations

from lightning.pytorch.plugins.environments import ClusterEnvironment
from typing_extensions import override

__all__ = ["SimulatedEnvironment"]


class SimulatedEnvironment(ClusterEnvironment):
    """Stand for the nodes of a simulation.

    Args:
        num_ranks: Number of processes of all nodes together.
        num_devices: Number of processes of a node.
        rank: The rank that is simulated.
    """

    def __init__(self, num_ranks: int, num_devices: int, rank: int) -> None:
        self._num_ranks = num_ranks
        self._num_devices = num_devices
        self._rank = rank

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "localhost"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._num_ranks

    @override
    def set_world_size(self, size: int) -> None:
        """Leave the number of processes as it is."""

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Leave the rank as it is."""

    @override
    def local_rank(self) -> int:
        return self._rank % self._num_devices

    @override
    def node_rank(self) -> int:
        return self._rank // self._num_devices
