"""Convert from and to the checkpoint directories of this project."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dist.checkpoint import TECHNIQUES, TensorInfo, is_sharded_checkpoint, put_positions_back, read, write
from lightning_dist.checkpoint.mapped import MappedTensors
from lightning_dist.checkpoint.snapshot import take_snapshot
from lightning_dist.run.convert.formats import Checkpoint, Options

__all__ = ["Directory"]


class Directory:
    """Read and write the directories that strategies of this project save."""

    name = "lightning-dist"
    about = "directory of this project"
    has_weights_alone = False

    def is_at(self, path: str) -> bool:
        """Return whether there is such a directory, also in a store with a URL."""
        return is_sharded_checkpoint(path)

    def read(self, path: str, options: Options, mapped: MappedTensors, weights_alone: bool) -> Checkpoint:
        """Return the checkpoint, without the states that only a run of the same layout could use."""

        def place(info: TensorInfo) -> torch.Tensor | None:
            is_left_out = info.path[0] != "state_dict" if weights_alone else info.path[0] == TECHNIQUES
            return None if is_left_out else mapped.empty(info.shape, info.dtype)

        checkpoint = read(path, place, weights_only=not options.trust)
        checkpoint.pop(TECHNIQUES, None)
        return checkpoint

    def write(self, path: str, checkpoint: Checkpoint, options: Options, mapped: MappedTensors) -> Checkpoint:
        """Write the checkpoint as one rank would."""
        put_positions_back(checkpoint)
        about: dict[str, Any] = {name: checkpoint[name] for name in ("epoch", "global_step") if name in checkpoint}
        write(path, take_snapshot(checkpoint, about=about))
        return checkpoint
