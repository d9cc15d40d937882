"""Reduce scalars when they are read from DTensors, so that every rank reads the global value and not its own part.

``p.grad.norm().item()``, ``float(p.sum())`` and ``if p.norm() > 1`` read the norm or sum of a DTensor, of which each
rank has a part. The read is a reduction, so all ranks must take part. The first read at each place in the code waits
for the other ranks through the store, and names those that do not arrive; later reads at that place reduce at once.
"""

from __future__ import annotations

import sys
from types import FrameType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from lightning_dist import _compat
from lightning_dist.mesh.consensus import timed_barrier

__all__ = ["arrive_at_place", "place_in_users_code", "read_whole_scalars"]

TIMEOUT_S = 30.0
"""Seconds that the first read at a place in the code waits for the other ranks."""

_known_places: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
"""Places in the code at which all ranks have already read together, for each default process group."""


def read_whole_scalars() -> None:
    """Make every read of a number from a DTensor in this process return the global value from now on.

    ``torch.equal`` compares whole DTensors as well: Lightning's BaseFinetuning uses it to find out whether a parameter
    is in an optimizer.
    """
    _compat.on_scalar_read(_read)
    _compat.on_equal(_equal)


def _read(tensor: DTensor) -> int | float | bool | complex:
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return tensor.to_local().item()
    arrive_at_place("reading a number of which each rank has a part", tensor)
    with torch.no_grad():
        return tensor.full_tensor().item()


def arrive_at_place(what: str, tensor: DTensor) -> None:
    """Wait for the other ranks of ``tensor`` when this place in the user's code is reached for the first time.

    Args:
        what: Description, for the message, of what the ranks are about to do together.
        tensor: DTensor on whose mesh the participating ranks are.

    Raises:
        OtherRankError: If a rank did not arrive in time.
    """
    place = place_in_users_code()
    assert dist.group.WORLD is not None
    known = _known_places.setdefault(dist.group.WORLD, set())
    if place not in known:
        timed_barrier(f"{what}, at {place}", TIMEOUT_S, sorted(tensor.device_mesh.mesh.flatten().tolist()))
        known.add(place)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if not isinstance(first, DTensor) or not isinstance(second, DTensor):
        whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in (first, second)]
        return torch.equal(*whole)
    mesh = first.device_mesh
    if mesh != second.device_mesh or first.placements != second.placements:
        return torch.equal(first.full_tensor(), second.full_tensor())
    is_equal = torch.tensor(int(torch.equal(first.to_local(), second.to_local())), device=first.device)
    for axis in range(mesh.ndim):
        dist.all_reduce(is_equal, dist.ReduceOp.MIN, mesh.get_group(axis))
    return bool(is_equal)


def place_in_users_code() -> str:
    """Return the file and line of the innermost code that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "lightning_dist.")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
