"""Change how Lightning finds and reads checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.fabric.plugins.io import torch_io
from lightning.pytorch import Trainer
from lightning.pytorch.core import saving
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_dist.checkpoint import is_sharded_checkpoint, keep_positions_apart, read_whole

__all__ = [
    "LINK_CHECKPOINT",
    "dump_checkpoint",
    "intercept_checkpoint_paths",
    "path_after_requeue",
    "read_checkpoint_directories",
    "requeue_signal",
]


LINK_CHECKPOINT = "_link_checkpoint"
"""Name of the method of ModelCheckpoint that links its last checkpoint, which it assumes to be written already."""


def read_checkpoint_directories() -> None:
    """Make ``load_from_checkpoint`` and Trainers with Lightning's own strategies accept a checkpoint directory.

    Calling this again is safe.

    This could be replaced by a registry of formats in Lightning, or by a ``load_from_checkpoint`` that uses a
    CheckpointIO.
    """
    load = saving.pl_load
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_file_or_directory(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | os.PathLike) and is_sharded_checkpoint(os.fspath(path_or_url)):
            return read_whole(os.fspath(path_or_url), map_location, weights_only is not False)
        return load(path_or_url, map_location=map_location, weights_only=weights_only)

    @wraps(load)
    def load_for_other_strategies(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        checkpoint = load_file_or_directory(path_or_url, map_location, weights_only)
        if isinstance(checkpoint, dict):
            keep_positions_apart(checkpoint)  # Only the strategies of this package resume them.
        return checkpoint

    saving.pl_load = load_file_or_directory
    torch_io.pl_load = load_for_other_strategies


def intercept_checkpoint_paths(
    strategy: type,
    choose: Callable[[Trainer, Any, Callable[[], Any]], Any],
    resume: Callable[[Trainer, Any, Callable[[Any], None]], None],
    postpone: Callable[[Trainer, Callable[[], None]], None],
) -> None:
    """Change how Trainers with strategies of a given class resolve and load ``ckpt_path``; calling this again is safe.

    This could be replaced by Lightning telling the strategy the user's ``ckpt_path``, and not only the path derived
    from it.

    Args:
        strategy: Class of the strategies to which this applies; with others, ``ckpt_path="auto"`` is refused.
        choose: Function that returns the path to load. Its arguments are the Trainer, the user's ``ckpt_path`` and a
            function that returns the path that Lightning derives from it.
        resume: Function that loads a checkpoint. Its arguments are the Trainer, the value that ``choose`` returned, and
            a function that reads the path that it is given, or nothing for None.
        postpone: Function that is given the Trainer and a restoring function, which restores the weights, the data
            module and the callbacks, and that calls the restoring function when the strategy is ready. Lightning would
            call it before the strategy's ``setup``, or else after ``on_fit_start``, when callbacks already need their
            states.
    """
    connector = _CheckpointConnector
    if hasattr(connector._parse_ckpt_path, "__wrapped__"):
        return
    parse_ckpt_path, resume_start = connector._parse_ckpt_path, connector.resume_start
    restore_modules_and_callbacks = connector._restore_modules_and_callbacks

    @wraps(parse_ckpt_path)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.trainer.strategy, strategy):
            return choose(self.trainer, ckpt_path, lambda: parse_ckpt_path(self, state_fn, ckpt_path, *args, **kwargs))
        if ckpt_path == "auto":
            raise MisconfigurationException(
                "ckpt_path='auto' works only with lightning-dist's strategies, and not with "
                f"{type(self.trainer.strategy).__name__}: use 'last'."
            )
        return parse_ckpt_path(self, state_fn, ckpt_path, *args, **kwargs)

    @wraps(resume_start)
    def start(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer.strategy, strategy):
            resume(self.trainer, checkpoint_path, lambda path: resume_start(self, path, *args, **kwargs))
        else:
            resume_start(self, checkpoint_path, *args, **kwargs)

    @wraps(restore_modules_and_callbacks)
    def restore(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer.strategy, strategy):
            postpone(self.trainer, lambda: restore_modules_and_callbacks(self, *args, **kwargs))
        else:
            restore_modules_and_callbacks(self, *args, **kwargs)

    connector._parse_ckpt_path = parse  # type: ignore[method-assign]
    connector.resume_start = start  # type: ignore[method-assign]
    connector._restore_modules_and_callbacks = restore  # type: ignore[method-assign]


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint that ``trainer`` would save now.

    This could be replaced by a public method of the Trainer.
    """
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def requeue_signal(trainer: Trainer) -> int | None:
    """Return the signal after which Lightning would let SLURM requeue this job; None if it would not."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def path_after_requeue(trainer: Trainer) -> str:
    """Return the path at which Lightning looks for a checkpoint after SLURM has requeued the job."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
