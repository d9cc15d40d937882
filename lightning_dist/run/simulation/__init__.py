"""Run a rank of many in one process, on tensors without values, to find out what it needs.

- ``rank``: Starts and ends a simulation.
- ``tensors``: Computes the shapes of results instead of the results.
- ``messages``: Gives this rank what the other ranks would send.
- ``storages``: Measures the memory of all tensors.
"""

from lightning_dist.run.simulation.rank import SimulatedRank, simulate_rank, without_values

__all__ = ["SimulatedRank", "simulate_rank", "without_values"]
