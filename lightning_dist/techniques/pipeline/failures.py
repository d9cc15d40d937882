"""Raise on all ranks of a pipeline an error that a step has raised on one of them.

The schedule runs to its end first, so that no rank waits for a message that is never sent.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from lightning_dist.mesh.collectives import any_of_flags
from lightning_dist.mesh.consensus import OtherRankError
from lightning_dist.mesh.flag_agreement import FlagAgreement, FlagsChangedError
from lightning_dist.mesh.objects import gather_objects

__all__ = ["Attempt", "Failure", "PathAgreement", "raise_first", "raise_together"]


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


_PATH_BITS = 20
"""Number of bits in which the number of a path is exchanged."""


class PathAgreement:
    """Let the ranks of a pipeline agree on the path that a step takes, if they may differ.

    A single rank may find that its step takes another path if the path depends on an attribute that only its own part
    of the model changes. All ranks must then trace the step. While paths do not depend on such attributes, no rank
    waits for the others (see :class:`~lightning_dist.mesh.flag_agreement.FlagAgreement`).

    Creating an instance is a collective over the pipeline.

    Args:
        group: Process group of the pipeline's ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._agreement = FlagAgreement(dist.get_process_group_ranks(group), "paths of steps", _describe_flag)

    def agree(self, path: int, is_same: bool, failure: Failure | None, group: dist.ProcessGroup) -> int:
        """Return the number of a step's path if all ranks have the same one, else -1. This is a collective.

        If the result is -1, all ranks must trace the step.

        Args:
            path: The number of the known path that the step takes on this rank; -1: none of the known paths.
            is_same: Whether the path depends on nothing that may differ between ranks.
            failure: The error that this rank has raised so far, or None.
            group: Process group of the pipeline's ranks, which uses gloo.

        Raises:
            Exception: On all ranks, if one of them has failed.
            FlagsChangedError: If the paths differ, when other ranks have gone on without waiting.
        """
        bits = [bool(path >> bit & 1) for bit in range(_PATH_BITS)]
        flags = [failure is not None, *bits, *(not bit for bit in bits)]
        is_usual = is_same and failure is None and path >= 0
        try:
            agreed = self._agreement.agree(flags, flags if is_usual else [False] * len(flags))
        except FlagsChangedError:
            if failure is not None:
                raise failure.error from None
            raise
        if agreed[0]:
            raise_first(failure, group)
        ones, zeros = agreed[1 : 1 + _PATH_BITS], agreed[1 + _PATH_BITS :]
        differs = any(one and zero for one, zero in zip(ones, zeros, strict=True))
        return -1 if differs else path


def _describe_flag(index: int) -> str:
    return "a step failed before its first microbatch" if index == 0 else "a step took another path through the model"


def raise_together(failure: Failure | None, group: dist.ProcessGroup | None) -> None:
    """Raise an error on all ranks if any rank has failed. This is a collective over ``group``.

    If no rank has failed, only one word is all-reduced. Otherwise :func:`raise_first` is called.

    Args:
        failure: The error of this rank; None if it has not failed.
        group: Process group of the ranks, which uses gloo; None: there is no other rank.
    """
    if group is None:
        if failure is not None:
            raise failure.error
    elif any_of_flags([failure is not None], group)[0]:
        raise_first(failure, group)


def raise_first(failure: Failure | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise the first error on all ranks, given that some rank has failed. This is a collective over ``group``.

    The rank that has failed first raises its error, and all other ranks raise a copy of it, so that an ``except``
    around a fit catches it on every rank.

    Args:
        failure: The error of this rank; None if it has not failed.
        group: Process group of the ranks, which uses gloo.

    Raises:
        OtherRankError: On the other ranks, if the first error cannot be pickled or unpickled.
    """
    told = gather_objects(_packed(failure), group)
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
