"""Find the newest good checkpoint for ``ckpt_path="last"`` and ``ckpt_path="auto"``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.checkpoint import CheckpointError, CheckpointNotFoundError, find
from lightning_dist.mesh.consensus import OtherRankError, raise_on_all_ranks
from lightning_dist.plugins import _compat
from lightning_dist.plugins.strategies.bookkeeping import absolute

__all__ = ["AUTO", "ResumePath", "candidates", "resolve_ckpt_path", "resume"]

AUTO = "auto"


class ResumePath(str):
    """Represent a path that the user did not name; if its checkpoint is damaged, the newest good one replaces it.

    Args:
        path: Path of the checkpoint that is tried first, or :data:`AUTO` for the newest.
        folders: Folders with the other checkpoints.
    """

    def __new__(cls, path: str, folders: list[str]) -> ResumePath:  # noqa: D102 - documented by the class
        self = super().__new__(cls, path)
        self.folders = folders
        return self

    folders: list[str]


def resolve_ckpt_path(trainer: Trainer, asked: Any, found: Callable[[], Any]) -> Any:
    """Turn the ``ckpt_path`` that the user has given into a path or a :class:`ResumePath`.

    Args:
        trainer: A Trainer with one of this project's strategies.
        asked: The ``ckpt_path`` that the user has given.
        found: Function that returns the path that Lightning derives from it.

    Raises:
        MisconfigurationException: If ``asked`` is :data:`AUTO`, and every run would save to another folder.
        CheckpointNotFoundError: If ``asked`` is ``"last"``, there is none, and the run does not train.
    """
    if asked == AUTO:
        return ResumePath(AUTO, _folders(trainer))
    path = found()
    if asked == "last" and path is None and trainer.state.fn != TrainerFn.FITTING:
        raise CheckpointNotFoundError(
            f"ckpt_path='last' finds no checkpoint, and trainer.{trainer.state.fn} would run the weights that the"
            " module has now. Give the path of a checkpoint, or give ModelCheckpoint the dirpath of the training."
        )
    return ResumePath(path, [os.path.dirname(absolute(path))]) if asked == "last" and path is not None else path


def resume(trainer: Trainer, path: Any, load: Callable[[Any], None]) -> None:
    """Call ``load`` with the first good checkpoint. This is a collective over all processes.

    Args:
        trainer: A Trainer with one of this project's strategies.
        path: The result of :func:`resolve_ckpt_path`.
        load: Function that reads the checkpoint at a path; given None, it lets training start from the beginning.

    Raises:
        CheckpointError: If there are checkpoints, but none of them can be read.
        CheckpointNotFoundError: If there is none, and the run does not train.
    """
    if not isinstance(path, ResumePath):
        load(path)
        return
    names: list[str] = []
    with raise_on_all_ranks(f"looking for checkpoints in {' and '.join(path.folders)}"):
        if trainer.global_rank == 0:
            names = candidates(path)
    names = trainer.strategy.broadcast(names)
    for candidate in names:
        try:
            load(candidate)
        except (CheckpointError, OtherRankError) as error:
            rank_zero_warn(f"{error} Trying the one before.")
        else:
            return
    if names:
        raise CheckpointError(
            f"None of the {len(names)} checkpoints in {' and '.join(path.folders)} can be read; the reasons are"
            " above. To start afresh, move them away."
        )
    if trainer.state.fn != TrainerFn.FITTING:
        raise CheckpointNotFoundError(
            f"There is no checkpoint in {' or '.join(path.folders)} for trainer.{trainer.state.fn}, which would run"
            f" the weights that the module has now. Give ckpt_path the path of a checkpoint instead of {str(path)!r}."
        )
    rank_zero_info(f"There is no checkpoint in {' or '.join(path.folders)} yet: training starts afresh.")
    load(None)


def candidates(path: ResumePath) -> list[str]:
    """Return the checkpoints to try: first ``path`` unless it is AUTO, then those in its folders, newest first."""
    newest_first = [found for folder in path.folders for found in find(folder)]
    newest_first.sort(key=lambda found: getattr(found[1], "saved_at", 0.0), reverse=True)
    first = [] if path == AUTO else [absolute(path)]
    return list(dict.fromkeys(first + [name for name, _ in newest_first]))


def _folders(trainer: Trainer) -> list[str]:
    """Return the folders that ``trainer`` saves checkpoints to, which must be the same at every start."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    folders = [str(callback.dirpath) for callback in callbacks if callback.dirpath]
    if callbacks and not folders:
        raise MisconfigurationException(
            f"ckpt_path={AUTO!r} needs a folder that is the same at every start: give ModelCheckpoint a dirpath."
            " Without one, each run saves to a folder of its own."
        )
    if not folders or _compat.requeue_signal(trainer) is not None:
        folders.append(str(trainer.default_root_dir))
    return list(dict.fromkeys(map(absolute, folders)))
