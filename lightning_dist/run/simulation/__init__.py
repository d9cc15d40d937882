"""Run a rank of many in one process, on tensors without values, to find out what it needs.

- ``rank``: Starts and ends a simulation.
- ``tensors``: Computes the shapes of results instead of the results.
- ``messages``: Gives this rank what the other ranks would send.
- ``storages``: Measures the memory of all tensors.
- ``work``: Counts operations and messages.
"""

from lightning_dist.run.simulation.rank import SimulatedRank, simulate_rank, without_values
from lightning_dist.run.simulation.storages import StorageMeter
from lightning_dist.run.simulation.work import Message, Operation, Shape, Work

__all__ = ["Message", "Operation", "Shape", "SimulatedRank", "StorageMeter", "Work", "simulate_rank", "without_values"]
