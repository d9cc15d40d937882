"""Log a checkpoint as one file that is a model of MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.checkpoint import CheckpointError, consolidate, read_manifest
from lightning_dist.plugins.loggers.spool import Entry

__all__ = ["models_of"]


def models_of(callback: ModelCheckpoint, max_mib: float, scratch: Path) -> Iterator[Entry]:
    """Yield the entry that logs a callback's best checkpoint, or else its last one, as a model.

    A sharded checkpoint is consolidated into one file by this process, which holds all of it in memory meanwhile.

    Args:
        callback: The callback that saved it.
        max_mib: Size in MiB up to which it is logged; a warning names a larger one.
        scratch: Folder for the file.
    """
    path = Path(callback.best_model_path or callback.last_model_path)
    if not path.name or not path.exists():
        return
    num_bytes = path.stat().st_size if path.is_file() else read_manifest(path).num_bytes
    if num_bytes > max_mib * 2**20:
        rank_zero_warn(
            f"{path} is not logged as a model: it has {num_bytes / 2**20:,.1f} MiB, which is more than"
            f" MLflowLogger(logged_model_max_mib={max_mib:g}). Raise the limit, or use log_model=True to upload its"
            " shards."
        )
        return
    file = path
    if path.is_dir():
        file = scratch / f"model-{time.time_ns()}" / f"{path.stem}.ckpt"
        try:
            consolidate(path, file)
        except (CheckpointError, OSError) as error:
            rank_zero_warn(f"{path} is not logged as a model: {error}")
            return
    name = re.sub(r"[^\w=-]+", "_", path.stem)
    yield {"model": [name, str(file.resolve()), file != path]}
