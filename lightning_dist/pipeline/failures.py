"""Errors of a step on some ranks, raised by all: the schedule runs to its end first, so that no rank waits in vain."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.consensus import OtherRankError

__all__ = ["Failure", "raise_together"]


@dataclass(frozen=True)
class Failure:
    """An error that a step has raised on this rank.

    Args:
        error: The error.
        where: What this rank did, for the message: ``"stage 1, microbatch 0"``.
        time: When it was raised, in seconds since the epoch.
    """

    error: BaseException
    where: str
    time: float

    @classmethod
    def now(cls, error: BaseException, where: str) -> Failure:
        """Return the failure that ``error`` is, raised at this moment."""
        return cls(error, where, time.time())


def agreed_path(path: int, failure: Failure | None, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the path of a step on which all ranks agree; -1: they do not, and follow it. A collective over ``group``.

    A rank alone may see that its step takes another path, by an attribute that only its own part of the model changes.

    Args:
        path: The number of the path on this rank; -1: it is not known.
        failure: This rank's error before.
        group: The ranks of a pipeline.
        device: Where their tensors are.

    Raises:
        Exception: On all ranks, if one has failed.
    """
    known = torch.tensor([int(failure is not None), path, -path], device=device)
    dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
    has_failed, highest, lowest = known.tolist()
    if has_failed:
        raise_together(failure, group, device)
    return path if highest == -lowest else -1


def raise_together(failure: Failure | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise on all ranks if any has failed. A collective over ``group``, of one number where none has.

    Ranks that did not fail first raise an error of the same type as the first, so that an ``except`` around a fit
    catches it on every rank alike.

    Args:
        failure: The error of this rank; None: it has none.
        group: The ranks; None: all processes.
        device: Where the group's backend takes tensors.

    Raises:
        OtherRankError: On ranks that did not fail first, where the first error cannot be sent to them.
    """
    failed = torch.tensor([failure is not None], dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    if not bool(failed.item()):
        return
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, _packed(failure), group=group)
    moment, rank, where, text, content = min(found for found in told if found is not None)
    if failure is not None and failure.time == moment:
        raise failure.error
    what = OtherRankError(f"The step failed on rank {rank} ({where}): {text}")
    raise _unpacked(content) or what from what


def _packed(failure: Failure | None) -> tuple[float, int, str, str, bytes] | None:
    if failure is None:
        return None
    text = f"{type(failure.error).__name__}: {failure.error}"
    try:
        content = pickle.dumps(failure.error)
    except Exception:  # an error may hold what cannot be sent
        content = b""
    return failure.time, dist.get_rank(), failure.where, text, content


def _unpacked(content: bytes) -> BaseException | None:
    try:
        error = pickle.loads(content) if content else None
    except Exception:  # an error whose __init__ takes other arguments than it keeps
        return None
    return error if isinstance(error, BaseException) else None
