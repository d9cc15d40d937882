"""Raise on all ranks of a pipeline an error that a step has raised on one of them.

The schedule runs to its end first, so that no rank waits for a message that is never sent.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.consensus import OtherRankError

__all__ = ["Attempt", "Failure", "agreed_path", "raise_together"]


@dataclass(frozen=True)
class Failure:
    """Hold an error that a step has raised on this rank.

    Args:
        error: Exception that the step or hook raised.
        where: The place of the error for the message: stage and microbatch (``"stage 1, microbatch 0"``), or a hook.
        time: The time at which the error was raised, in seconds since the epoch.
    """

    error: BaseException
    where: str
    time: float

    @classmethod
    def now(cls, error: BaseException, where: str) -> Failure:
        """Return a failure that was raised at this moment.

        Args:
            error: Exception that was raised just now.
            where: The stage and the microbatch, or the name of a hook, for the message.
        """
        return cls(error, where, time.time())


class Attempt:
    """Catch an error that is raised in a ``with`` block, and keep it until all ranks can raise it together.

    Args:
        where: The stage and the microbatch, or the name of a hook, for the message.
    """

    def __init__(self, where: str) -> None:
        self.failure: Failure | None = None
        """The first error that was caught, or None."""
        self._where = where

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Keep and suppress ``error``, unless it is one that ends the program, such as KeyboardInterrupt."""
        if isinstance(error, Exception):
            self.failure = self.failure or Failure.now(error, self._where)
            return True
        return False


def agreed_path(path: int, failure: Failure | None, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the number of a step's path if all ranks have the same one, else -1. This is a collective over ``group``.

    If the result is -1, all ranks must trace the step. A single rank may find that its step takes another path, because
    the path depends on an attribute that only its own part of the model changes.

    Args:
        path: The number of the known path that the step takes on this rank; -1: none of the known paths.
        failure: The error that this rank has raised so far, or None.
        group: Process group of the pipeline's ranks.
        device: The device on which the backend of the group takes tensors.

    Raises:
        Exception: On all ranks, if one of them has failed.
    """
    known = torch.tensor([int(failure is not None), path, -path], device=device)
    dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
    has_failed, highest, lowest = known.tolist()
    if has_failed:
        raise_together(failure, group, device)
    return path if highest == -lowest else -1


def raise_together(failure: Failure | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise an error on all ranks if any rank has failed. This is a collective over ``group``.

    If no rank has failed, only one number is all-reduced. Otherwise, the rank that has failed first raises its error
    and all other ranks raise a copy of it, so that an ``except`` around a fit catches it on every rank.

    Args:
        failure: The error of this rank; None if it has not failed.
        group: Process group of the ranks; None: all processes.
        device: The device on which the backend of the group takes tensors.

    Raises:
        OtherRankError: On the other ranks, if the first error cannot be pickled or unpickled.
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
    except Exception:  # The error may hold an object that cannot be pickled.
        content = b""
    return failure.time, dist.get_rank(), failure.where, text, content


def _unpacked(content: bytes) -> BaseException | None:
    try:
        error = pickle.loads(content) if content else None
    except Exception:  # The __init__ of the error's class may take other arguments than the error keeps.
        return None
    return error if isinstance(error, BaseException) else None
