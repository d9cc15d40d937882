"""Place the ranks of distributed tests on the accelerator that ``pytest --accelerator`` names."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["VARIABLE", "device_type", "on_gpu", "place", "variables_of_rank"]

VARIABLE = "LIGHTNING_DIST_TESTS_ACCELERATOR"
"""Environment variable with the accelerator, which the workers inherit; ``"cpu"`` if it is not set."""


def on_gpu() -> bool:
    """Return whether the ranks of distributed tests run on GPUs."""
    return os.environ.get(VARIABLE) == "gpu"


def device_type() -> str:
    """Return the type of the device on which the ranks of distributed tests run."""
    return {"gpu": "cuda", "simulated": "simulated"}.get(os.environ.get(VARIABLE, ""), "cpu")


def place(in_one_process: bool = False) -> dict[str, Any]:
    """Return the arguments of the Trainer that say where it trains: ``accelerator``, ``devices`` and ``num_nodes``.

    Args:
        in_one_process: Whether to train in this process alone, instead of on all ranks of the test. Then it trains on
            the CPU if the accelerator is simulated.
    """
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    accelerator = os.environ.get(VARIABLE, "cpu")
    return {
        "accelerator": "cpu" if in_one_process and accelerator == "simulated" else accelerator,
        "devices": 1 if in_one_process else local_size,
        "num_nodes": 1 if in_one_process else int(os.environ["WORLD_SIZE"]) // local_size,
    }


def variables_of_rank(rank: int, world_size: int, num_nodes: int) -> dict[str, str]:
    """Return torchrun's environment variables about a rank's place.

    If there are fewer GPUs than ranks, all ranks share the first GPU. Each of them is then said to be the only rank of
    its node, and NCCL, which accepts one rank per GPU of a host, is told that they are on different hosts.
    """
    shares_gpu = False
    if on_gpu():
        import torch

        shares_gpu = torch.cuda.device_count() < world_size
    local_size = 1 if shares_gpu else world_size // num_nodes
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank % local_size,
        "GROUP_RANK": rank // local_size,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_size,
        **({"NCCL_HOSTID": f"rank{rank}"} if shares_gpu else {}),
    }
    return {name: str(value) for name, value in variables.items()}
