"""Small checkpoints whose content says which save they are of, and a look at what is on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_dist.checkpoint import CheckpointError, read, take_snapshot, write

__all__ = ["content", "forked", "found", "save", "with_ranks"]

SHAPES = {"weight": (64, 33), "bias": (33,), "odd": (7, 3)}


def content(number: int) -> dict[str, Any]:
    """What save ``number`` holds."""
    generator = torch.Generator().manual_seed(number)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {"state_dict": tensors, "number": number, "buffer": torch.arange(5) + number}


def save(path: Path | str, number: int) -> None:
    """Write save ``number`` to ``path``, sharded over the ranks, if there are any."""
    checkpoint = content(number)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        checkpoint["state_dict"] = {
            name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
            for name, tensor in checkpoint["state_dict"].items()
        }
    write(path, take_snapshot(checkpoint, own={"rng": torch.get_rng_state()}))


def found(path: Path) -> int | None:
    """The number of the save that is at ``path``, all of it; None if there is nothing at all.

    Raises:
        AssertionError: If it is not exactly what one save wrote.
        CheckpointError: If it cannot be read.
    """
    if not os.path.lexists(path):
        return None
    checkpoint = read(path, lambda info: torch.empty(info.shape, dtype=info.dtype))
    expected = content(checkpoint["number"])
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(checkpoint["state_dict"][name], tensor), f"{name} is not of save {checkpoint['number']}"
    assert torch.equal(checkpoint["buffer"], expected["buffer"])
    number: int = checkpoint["number"]
    return number


def with_ranks(num_ranks: int, store: Path, function: Callable[..., object], *args: Any) -> list[int]:
    """Run ``function(rank, *args)`` in forks of this process, one a rank, and return their exit codes.

    Where a rank dies, the others see it and end by themselves.
    """

    def run(rank: int) -> None:
        if num_ranks > 1:
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks
            )
        function(rank, *args)

    return forked(num_ranks, run)


def forked(num_ranks: int, function: Callable[[int], object]) -> list[int]:
    """Run ``function(rank)`` in forks of this process, one a rank, and return their exit codes."""
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                function(rank)
                code = 0
            except CheckpointError:
                code = 3
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
