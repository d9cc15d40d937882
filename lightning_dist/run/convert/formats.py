"""Describe what a format of checkpoints has to do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from lightning_dist.checkpoint.mapped import MappedTensors

__all__ = ["Checkpoint", "Format", "Options", "unfinished", "with_bookkeeping"]

Checkpoint = dict[str, Any]
"""Lightning's checkpoint dictionary with whole tensors; a format of weights alone has its ``"state_dict"`` only."""


@dataclass(frozen=True)
class Options:
    """Say how to convert.

    Args:
        prefix: Text that the names in a LightningModule have before those of its Hugging Face model.
        config: ``config.json`` of a Hugging Face model, or a folder that has it. It is needed to write such a folder.
        trust: Whether to load pickled objects of any class, which can run any code.
    """

    prefix: str = "model."
    config: Path | None = None
    trust: bool = False


class Format(Protocol):
    """Read and write checkpoints of one format.

    Attributes:
        name: Name of the format in ``--to``.
        about: A few words about it.
        has_weights_alone: Whether it has weights, and nothing else of a checkpoint.
    """

    name: str
    about: str
    has_weights_alone: bool

    def is_at(self, path: str) -> bool:
        """Return whether there is a checkpoint of this format at ``path``."""

    def read(self, path: str, options: Options, mapped: MappedTensors, weights_alone: bool) -> Checkpoint:
        """Return the checkpoint at ``path``.

        Args:
            path: Path of the checkpoint.
            options: How to convert.
            mapped: Where to make tensors that cannot be mapped from the files themselves.
            weights_alone: Whether only ``"state_dict"`` is needed.

        Raises:
            CheckpointError: If it is damaged, or holds pickled objects that are not trusted.
            ValueError: If it cannot be read for another reason.
        """

    def write(self, path: str, checkpoint: Checkpoint, options: Options, mapped: MappedTensors) -> Checkpoint:
        """Write ``checkpoint`` to ``path``, where nothing is, and return what reading it gives.

        Raises:
            ValueError: If the format cannot hold it.
        """


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path``, in a temporary folder, and move what was written there to ``path`` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        new = Path(folder) / path.name
        yield new
        os.replace(new, path)


def with_bookkeeping(state_dict: Mapping[str, Any]) -> Checkpoint:
    """Return weights as the checkpoint that Lightning saves with ``weights_only=True``."""
    return {"epoch": 0, "global_step": 0, **_version(), "state_dict": dict(state_dict)}


def _version() -> dict[str, str]:
    for name in ("lightning", "pytorch-lightning"):
        try:
            return {"pytorch-lightning_version": version(name)}
        except PackageNotFoundError:
            continue
    return {}
