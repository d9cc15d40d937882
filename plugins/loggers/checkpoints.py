"""Upload the checkpoints of ModelCheckpoints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist.plugins.loggers.spool import Entry

__all__ = ["new_checkpoints", "upload_of"]


def new_checkpoints(callback: ModelCheckpoint, uploaded: dict[str, float]) -> list[tuple[Path, float | None]]:
    """Return the checkpoints of a callback that are not uploaded yet, with their scores, oldest first.

    Args:
        callback: The callback.
        uploaded: The times at which uploaded checkpoints were modified, by path; the returned ones are added.
    """
    new = []
    for path, score in _checkpoints(callback).items():
        modified = path.stat().st_mtime
        if uploaded.get(str(path), -1.0) < modified:
            uploaded[str(path)] = modified
            new.append((path, score))
    return new


def upload_of(path: Path, score: float | None, callback: ModelCheckpoint, scratch: Path) -> Iterator[Entry]:
    """Yield the entries that upload a checkpoint, and what is known about it.

    A directory, whose files are not changed any more, is linked to ``scratch``, so that it can be uploaded although
    the callback removes it.

    Args:
        path: File or directory of the checkpoint.
        score: Value of the metric that the callback monitors.
        callback: The callback that saved it.
        scratch: Folder for the links.
    """
    linked = _linked(path, scratch) if path.is_dir() else None
    yield {"file": [str(linked or path.resolve()), path.stem, linked is not None]}
    is_best = str(path) == callback.best_model_path
    about = {
        "score": score,
        "monitor": callback.monitor,
        "original_filename": path.name,
        "aliases": ["latest", "best"] if is_best else ["latest"],
    }
    yield {"text": [f"{path.stem}/metadata.json", json.dumps(about, indent=2)]}


def _linked(directory: Path, scratch: Path) -> Path | None:
    """Return a copy of a directory whose files are links to the original ones; None if the file system has no links."""
    copy = scratch / f"upload-{time.time_ns()}" / directory.name
    try:
        for path in [file for file in directory.rglob("*") if file.is_file()]:
            link = copy / path.relative_to(directory)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
    except OSError:
        return None
    return copy


def _checkpoints(callback: ModelCheckpoint) -> dict[Path, float | None]:
    """Return the existing checkpoints of a callback, files and directories, oldest first, with their scores."""
    scores: dict[str, Tensor | None] = {
        callback.last_model_path: callback.current_score,
        callback.best_model_path: callback.best_model_score,
        **callback.best_k_models,
    }
    existing = [(Path(path), score) for path, score in scores.items() if path and Path(path).exists()]
    existing.sort(key=lambda item: item[0].stat().st_mtime)
    return {path: None if score is None else float(score) for path, score in existing}
