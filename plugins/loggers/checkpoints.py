"""Upload the checkpoints of ModelCheckpoints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dist.plugins.loggers.logged_model import models_of
from lightning_dist.plugins.loggers.spool import Entry

__all__ = ["CheckpointUploads"]


class CheckpointUploads:
    """Decide which checkpoints are uploaded, and when.

    Args:
        log_model: ``"all"``: all of them, when they are saved. True: those that exist at the end of a fit, or when they
            are saved if ``save_top_k`` is -1. False: none.
        max_model_mib: Size in MiB up to which the best one becomes a model of MLflow at the end; None: none does.
        scratch: Local folder for files that are uploaded.
    """

    def __init__(self, log_model: bool | Literal["all"], max_model_mib: float | None, scratch: Path) -> None:
        self._log_model = log_model
        self._max_model_mib = max_model_mib
        self._scratch = scratch
        self._callbacks: dict[str, ModelCheckpoint] = {}
        self._uploaded: dict[str, float] = {}

    def saved(self, callback: ModelCheckpoint) -> Iterator[Entry]:
        """Yield what is to be uploaded now that a callback has saved a checkpoint."""
        self._callbacks[callback.state_key] = callback
        if self._log_model == "all" or (self._log_model is True and callback.save_top_k == -1):
            yield from self._new_ones(callback)

    def at_end(self, has_failed: bool) -> Iterator[Entry]:
        """Yield what is to be uploaded at the end of a fit."""
        for callback in self._callbacks.values():
            if self._log_model is True:
                yield from self._new_ones(callback)
            if self._max_model_mib is not None and not has_failed:
                yield from models_of(callback, self._max_model_mib, self._scratch)
        self._callbacks = {}

    def _new_ones(self, callback: ModelCheckpoint) -> Iterator[Entry]:
        for path, score in _checkpoints(callback).items():
            modified = path.stat().st_mtime
            if self._uploaded.get(str(path), -1.0) < modified:
                self._uploaded[str(path)] = modified
                yield from self._upload(path, score, callback)

    def _upload(self, path: Path, score: float | None, callback: ModelCheckpoint) -> Iterator[Entry]:
        # The files of a directory are not changed any more, so links keep them although the callback removes it.
        linked = _linked(path, self._scratch) if path.is_dir() else None
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
