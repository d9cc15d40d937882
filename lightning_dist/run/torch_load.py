"""Let ``torch.load`` read a checkpoint directory.

This module imports neither torch nor modules that do, before a directory is read.
"""

from __future__ import annotations

from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["read_directories"]


def read_directories() -> None:
    """Patch ``torch.load`` to read checkpoint directories. Calling this again is safe.

    Replaced by: a format for shards that ``torch.load`` reads.
    """
    import torch

    own_load = torch.load

    @wraps(own_load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | PathLike) and Path(f).is_dir():
            from lightning_dist.checkpoint import is_sharded_checkpoint, read_whole

            if is_sharded_checkpoint(Path(f)):
                return read_whole(Path(f), map_location, weights_only=kwargs.get("weights_only") is not False)
        return own_load(f, map_location, *args, **kwargs)

    torch.load = load
