"""Reach torch's process groups, their store, and the record of their collectives."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

__all__ = [
    "around_collectives",
    "backend_of",
    "created_with",
    "default_group",
    "default_store",
    "new_group_of",
    "num_collectives",
    "process_groups",
    "recorded_collectives",
    "simulated_backend",
    "simulated_processes",
    "without_process_group",
]


def default_group() -> dist.ProcessGroup:
    """Return the process group of all processes."""
    group = dist.group.WORLD
    assert group is not None, "there is no process group"
    return group


def default_store() -> dist.Store:
    """Return the store with which the default process group was created."""
    store: dist.Store = default_group().get_group_store()
    return store


_SIMULATED = "fake"
"""Name of torch's backend whose groups send nothing."""

_simulated: list[str] = []
"""The backend that the process groups of a simulation stand for, while there is one."""


@contextmanager
def simulated_processes(num_ranks: int, rank: int, backend: str) -> Iterator[None]:
    """Let process groups in this context stand for those of many processes, although there is only this one.

    Replaced by: a public way to create a process group of torch's fake backend.

    Args:
        num_ranks: Number of processes that are simulated.
        rank: Rank of this process among them.
        backend: Name of the backend that the groups stand for, such as ``"gloo"`` or ``"nccl"``.

    Raises:
        RuntimeError: If a process group is initialized already.
    """
    if dist.is_initialized():
        raise RuntimeError("Processes cannot be simulated in a process that has a process group already.")
    # The first call lets torch load the backend, and the store that it chooses holds nothing.
    dist.init_process_group(_SIMULATED, rank=rank, world_size=num_ranks)
    dist.destroy_process_group()
    dist.init_process_group(_SIMULATED, rank=rank, world_size=num_ranks, store=dist.HashStore())
    _simulated.append(backend)
    new_group = dist.new_group

    def simulated_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **kwargs: Any
    ) -> Any:
        """Make a group that stands for one of any backend: a real one would wait for the other processes."""
        return new_group(ranks, timeout, _SIMULATED, **kwargs)

    try:
        with mock.patch.object(dist, "new_group", simulated_group):
            yield
    finally:
        _simulated.clear()
        dist.destroy_process_group()


def simulated_backend() -> str | None:
    """Return the backend that process groups stand for in a simulation; None: they are real."""
    return _simulated[0] if _simulated else None


def backend_of(group: dist.ProcessGroup | None = None) -> str:
    """Return the name of the backend of a process group, or of the one for which it stands in a simulation.

    Args:
        group: The process group; None: that of all processes.
    """
    name: str = dist.get_backend(group)
    return _simulated[0] if _simulated and name == _SIMULATED else name


def created_with(backend: str) -> str:
    """Return the backend with which a group is created that is to have ``backend``; a simulation has one of its own."""
    return _SIMULATED if _simulated else backend


_num_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""Number of groups of each name that this process has made, for each default process group."""


def new_group_of(ranks: Sequence[int], backend: str, description: str) -> dist.ProcessGroup:
    """Create a process group of some ranks, which is a collective over these ranks only.

    With ``use_local_synchronization``, torch names a group by the number of groups that a rank has made before. Ranks
    of different stages have made different numbers, and would then wait for groups of different names for ever. This
    name counts only groups of the same ranks with the same description. Replaced by: a ``new_group`` that is given the
    name.

    Args:
        ranks: Global ranks of the group, in increasing order, with this rank.
        backend: Backend of the group.
        description: Description of the group, for logs and reports of hangs.
    """
    made = _num_made.setdefault(default_group(), Counter())
    # The store keeps the name, so that it must not grow with the number of ranks.
    name = f"{description} of {len(ranks)} ranks, {hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]}"
    made[name] += 1
    own = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *args, **kwargs: GroupName(f"{name}, {made[name]}")
    try:
        group = dist.new_group(
            list(ranks), backend=created_with(backend), use_local_synchronization=True, group_desc=description
        )
    finally:
        distributed_c10d._process_group_name = own
    assert isinstance(group, dist.ProcessGroup)
    return group


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups that this rank is in; torch's public functions return only the default one."""
    return list(dist.distributed_c10d._world.pg_map)


@contextmanager
def without_process_group() -> Iterator[None]:
    """Let code in this context find no process group, as in a program of one process.

    Replaced by: a public way to run code outside of the process group that is initialized.
    """
    world = dist.distributed_c10d._world
    default, world.default_pg = world.default_pg, None
    try:
        yield
    finally:
        world.default_pg = default


def num_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives of ``group`` this rank has entered.

    Raises:
        RuntimeError: If the backend does not count them.
    """
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # the stub leaves it out
    return number


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder, and of the additional one for NCCL that CUDA builds have.

    Replaced by: a documented dump as JSON; only the pickled one is documented.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(torch._C._distributed_c10d, name, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    return entries


_COLLECTIVES = [
    name for name, method in vars(dist.ProcessGroup).items() if re.search(r"-> [\w.:]*\bWork\b", method.__doc__ or "")
]
"""The names of the methods by which a process group begins to communicate: those that return a ``Work``."""


@contextmanager
def around_collectives(run: Callable[[Callable[[], Any]], Any], has_streams: bool) -> Iterator[None]:
    """Pass each wait for a collective that begins in this context to ``run``, from all threads and all callers.

    With streams, a collective may run on the stream that also computes, and FSDP2 lets that stream wait for an event
    of another one. Beginning a collective and waiting for an event are therefore passed to ``run`` as well.

    Replaced by: a hook of torch.distributed that is called when a rank, or a stream, begins to wait and when it ends.

    Args:
        run: Function that calls the function that it is given, and returns its result.
        has_streams: Whether collectives run on streams.
    """
    places: list[tuple[Any, str]] = [(dist.Work, "wait")]
    if has_streams:
        places += [(dist.ProcessGroup, name) for name in _COLLECTIVES]
        places.append((torch.cuda.Stream, "wait_event"))
    before = [vars(owner)[name] for owner, name in places]
    for (owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, _passed_to(run, function))
    try:
        yield
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def _passed_to(run: Callable[[Callable[[], Any]], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def passed(*args: Any, **kwargs: Any) -> Any:
        return run(partial(function, *args, **kwargs))

    return passed
