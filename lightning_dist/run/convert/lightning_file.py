"""Convert from and to the files that Lightning saves, and from other files of ``torch.save``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from lightning_dist.checkpoint import CheckpointError, keep_positions_apart
from lightning_dist.checkpoint.mapped import MappedTensors
from lightning_dist.checkpoint.snapshot import SAFE
from lightning_dist.checkpoint.state import by_index
from lightning_dist.run.convert.formats import Checkpoint, Options, unfinished, with_bookkeeping

__all__ = ["LightningFile", "load_file"]

_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")


class LightningFile:
    """Read and write files of ``torch.save`` with Lightning's dictionary; read files with a state dict alone."""

    name = "lightning"
    about = "file of Lightning"
    has_weights_alone = False

    def is_at(self, path: str) -> bool:
        """Return whether there is a file with an ending of ``torch.save``."""
        return Path(path).suffix in _SUFFIXES and Path(path).is_file()

    def read(self, path: str, options: Options, mapped: MappedTensors, weights_alone: bool) -> Checkpoint:
        """Return the checkpoint, whose tensors are mapped from the file."""
        content = load_file(Path(path), options.trust)
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds a {type(content).__name__}, and no dictionary of weights.")
        if "state_dict" in content:
            return {"state_dict": content["state_dict"]} if weights_alone else content
        weights = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        if not weights or len(weights) < len(content):
            raise ValueError(
                f"{path} is neither a checkpoint of Lightning, which has a state_dict, nor a state dict alone. It has"
                f" the keys {', '.join(map(str, list(content)[:5]))}."
            )
        return with_bookkeeping(weights)

    def write(self, path: str, checkpoint: Checkpoint, options: Options, mapped: MappedTensors) -> Checkpoint:
        """Write the checkpoint as Lightning itself would have saved it."""
        states = checkpoint.get("optimizer_states", [])
        checkpoint = {
            **checkpoint,
            "optimizer_states": [by_index(state) if "param_groups" in state else state for state in states],
        }
        if not states:
            del checkpoint["optimizer_states"]
        keep_positions_apart(checkpoint)
        with unfinished(Path(path)) as new:
            torch.save(checkpoint, new)
        return checkpoint


def load_file(path: Path, trust: bool) -> Any:
    """Return what ``torch.save`` wrote to ``path``, with tensors that are mapped from the file.

    Raises:
        CheckpointError: If it is damaged, or has objects of classes that are not trusted.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE)):
            try:
                return torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=not trust)  # A file of torch before 1.6.
    except pickle.UnpicklingError as error:
        names = _unsafe_names(path)
        raise CheckpointError(
            f"{path} holds objects{f' of {names}' if names else ''} that are neither tensors nor plain values, and"
            " reading those can run any code. If you trust the source of the file, add --trust."
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}.") from error


def _unsafe_names(path: Path) -> str:
    try:
        return ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # Files of old versions of torch are not examined by it.
        return ""
