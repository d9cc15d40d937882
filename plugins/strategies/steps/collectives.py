"""Refuse collectives in a pipeline's step that not all ranks of their group would call."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor

import lightning_dist
from lightning_dist._compat import DispatchMode
from lightning_dist.tracing.step_graph import TraceError, note_exchange

__all__ = ["stand_ins_for_collectives", "without_foreign_collectives"]

_COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "new_group", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter", "scatter_object_list",
)  # fmt: skip
"""Functions of ``torch.distributed`` that all ranks of a group must call."""


@contextmanager
def without_foreign_collectives(peers: Collection[int]) -> Iterator[None]:
    """Refuse collectives in this context whose group has ranks of other stages.

    Ranks with the same stages run the same code of a step in the same order. Ranks of other stages end the step where
    the next stage begins, so that the code after the model runs on the last stage alone.

    Args:
        peers: The ranks that have the same stages as this one.

    Raises:
        TraceError: From the refused collective; the message names the line that calls it.
    """

    def run(name: str, own: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return own(*args, **kwargs)

    with _replaced(peers, run):
        yield


@contextmanager
def stand_ins_for_collectives(peers: Collection[int]) -> Iterator[None]:
    """Replace collectives in this context by local functions that fill their outputs from this rank's tensors.

    This is for steps on fake tensors, which have no values to send.

    Args:
        peers: The ranks that have the same stages as this one.

    Raises:
        TraceError: From a collective that a step of a pipeline cannot call.
    """

    def run(name: str, own: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("all_gather", "all_gather_into_tensor"):
            gathered, own_part, *_ = [*args, *(kwargs[k] for k in _GATHERED if k in kwargs)]
            note_exchange(own_part)
            for part in gathered.chunk(dist.get_world_size(group)) if isinstance(gathered, Tensor) else gathered:
                part.copy_(own_part.view_as(part))
        elif name in ("all_reduce", "broadcast"):
            note_exchange(args[0] if args else kwargs["tensor"])
        elif name != "barrier":
            raise TraceError(_refusal(name))
        is_asynchronous = _signature(own).bind(*args, **kwargs).arguments.get("async_op", False)
        return _Done() if is_asynchronous else None

    with _replaced(peers, run), _NoCollectives():
        yield


class _Done:
    """Stand for a :class:`torch.distributed.Work` that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


_GATHERED = ("tensor_list", "output_tensor", "tensor", "input_tensor")
"""Names of the first two arguments of all-gathers: the output, then this rank's part."""


_Run = Callable[[str, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function that runs a collective, given its name, torch's function, its group, and its arguments."""


@contextmanager
def _replaced(peers: Collection[int], run: _Run) -> Iterator[None]:
    """Replace collectives of ``torch.distributed`` on this thread by functions that check the group and call run."""
    replacement = _Replacement(peers, run, get_ident())
    before = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    vars(dist).update({name: partial(replacement, name, own) for name, own in before.items()})
    try:
        yield
    finally:
        vars(dist).update(before)


@dataclass(frozen=True)
class _Replacement:
    """Run instead of collectives, and check their groups.

    Args:
        peers: The ranks that have the same stages as this one.
        run: Function that runs a collective whose group has been checked.
        thread: The identifier of the thread that runs the step.
    """

    peers: Collection[int]
    run: _Run
    thread: int

    def __call__(self, name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if get_ident() != self.thread:  # Other threads, such as the checkpoint writer's, do not run the step.
            return own(*args, **kwargs)
        group_at = _position_of_group(own)
        group = kwargs.get("group", args[group_at] if group_at is not None and len(args) > group_at else None)
        _check(name, group, self.peers)
        return self.run(name, own, group, args, kwargs)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    while isinstance(function, partial):  # An outer context has replaced it already.
        function = function.args[1]
    return inspect.signature(function)


@cache
def _position_of_group(function: Callable[..., Any]) -> int | None:
    names = list(_signature(function).parameters)
    return names.index("group") if "group" in names else None


def _check(name: str, group: Any, peers: Collection[int]) -> None:
    ranks = dist.get_process_group_ranks(group)
    if not set(ranks) <= set(peers):
        raise TraceError(_refusal(name))


def _refusal(name: str) -> str:
    return (
        f"The step calls torch.distributed.{name}{_place()}, which waits for other stages of the pipeline. They never"
        " call it: the code after the model runs on the last stage alone, once per microbatch. In a step, use"
        " self.all_gather(...) or self.log(..., sync_dist=True), which run over the ranks that have a part of the"
        " batch; or move the call into a hook that runs on every rank, such as on_train_batch_end."
    )


_LIBRARIES = (
    *(str(Path(str(found.__file__)).parent) for found in (torch, lightning, torchmetrics, lightning_dist)),
    str(Path(lightning_dist.__file__).resolve().parent),
    str(Path(__file__).resolve().parents[1]),
    "<",
)


def _place() -> str:
    """Return the place and the text of the user's line that calls; empty if only library code is on the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES):
            line = linecache.getline(path, frame.f_lineno).strip()
            return f" ({Path(path).name}:{frame.f_lineno}" + (f", `{line}`)" if line else ")")
        frame = frame.f_back
    return ""


class _NoCollectives(DispatchMode):
    """Refuse ``c10d`` operations, which catches collectives that the user's module has imported by name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise TraceError(_refusal(func.name().partition("::")[2].partition(".")[0].rstrip("_")))
        return func(*args, **(kwargs or {}))
