"""Start a simulation, in which this process is one rank of many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from lightning_dist._compat import assigning_converted_parameters, simulated_processes
from lightning_dist.model.tensor_places import put, tensor_places
from lightning_dist.run.simulation.storages import StorageMeter
from lightning_dist.run.simulation.tensors import ValuelessTensors
from lightning_dist.run.simulation.work import WorkMeter

__all__ = ["SimulatedRank", "simulate_rank", "without_values"]


@dataclass(frozen=True)
class SimulatedRank:
    """Hold what a simulation consists of.

    Args:
        meter: The memory of the rank's tensors.
        tensors: The context in which tensors have no values.
        work: The operations of the rank.
    """

    meter: StorageMeter
    tensors: ValuelessTensors
    work: WorkMeter


@contextmanager
def simulate_rank(num_ranks: int, rank: int, backend: str) -> Iterator[SimulatedRank]:
    """Run code in this context as one rank of many, on tensors without values.

    Process groups, collectives and large tensors behave as in a run of ``num_ranks`` processes, but nothing is sent or
    computed, and large tensors take no memory. This rank receives what it sends.

    Args:
        num_ranks: Number of processes of the run.
        rank: The rank that is simulated, in ``[0, num_ranks)``.
        backend: Backend of the run's process groups, ``"gloo"`` or ``"nccl"``.

    Raises:
        RuntimeError: If a process group is initialized already.
    """
    meter, work = StorageMeter(), WorkMeter()
    tensors = ValuelessTensors(meter, work)
    processes = simulated_processes(num_ranks, rank, backend)
    with processes, meter.watching_resizes(), assigning_converted_parameters(), tensors:
        yield SimulatedRank(meter, tensors, work)


def without_values(module: nn.Module, simulation: SimulatedRank) -> None:
    """Replace the parameters and buffers of ``module`` by tensors without values, except those on the meta device.

    Args:
        module: The module, whose shared parameters stay shared.
        simulation: The simulation, in whose context the module is used.
    """
    for places in tensor_places(module).values():
        container, key = places[0]
        tensor = container[key]
        if not tensor.is_meta:
            put(simulation.tensors.without_values(tensor), places)
