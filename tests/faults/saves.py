"""Write small checkpoints whose content depends on the number of the save, and check which save is on the disk."""

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
    """Return the content of save ``number``."""
    generator = torch.Generator().manual_seed(number)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {"state_dict": tensors, "number": number, "buffer": torch.arange(5) + number}


def save(path: Path | str, number: int) -> None:
    """Write save ``number`` to ``path``, sharded over the ranks if there is a process group."""
    checkpoint = content(number)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        checkpoint["state_dict"] = {
            name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
            for name, tensor in checkpoint["state_dict"].items()
        }
    write(path, take_snapshot(checkpoint, rank_state={"rng": torch.get_rng_state()}))


def found(path: Path) -> int | None:
    """Return the number of the save at ``path`` after checking its content; None if there is nothing at ``path``.

    Raises:
        AssertionError: If the content is not exactly that of one save.
        CheckpointError: If the checkpoint cannot be read.
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
    """Run ``function(rank, *args)`` in one fork of this process per rank, and return their exit codes.

    With several ranks there is a process group: when a rank dies, the others notice it and end by themselves.
    """

    def run(rank: int) -> None:
        if num_ranks > 1:
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks
            )
        function(rank, *args)

    return forked(num_ranks, run)


def forked(num_ranks: int, function: Callable[[int], object]) -> list[int]:
    """Run ``function(rank)`` in one fork of this process per rank, and return their exit codes.

    The exit code is 0, or 3 if the function raised CheckpointError, or 1 if it raised anything else.
    """
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
