"""Keep the records of ModelCheckpoint and of the loggers consistent with the checkpoints that were committed.

ModelCheckpoint assumes that a save is done as soon as it has requested it: it forgets and removes the previous
checkpoint, tells loggers of a directory that is not there yet, and gives two checkpoints one name. All of this is wrong
for saves in the background, so this module corrects the state of the ModelCheckpoints and delays the calls to loggers.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_dist.checkpoint import Save
from lightning_dist.plugins import _compat

__all__ = ["Bookkeeping", "absolute"]


def absolute(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as an absolute path, which does not depend on the working directory; URLs are unchanged."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


class Bookkeeping:
    """Track the saves and removals of one fit at a time.

    All ranks must call every method in the same order, with absolute paths.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._records: dict[ModelCheckpoint, _Record] = {}
        self._loggers: list[Logger] = []
        self._exists: dict[str, bool] = {}
        self._newest = ""
        self._removed_for: dict[str, list[str]] = {}  # It maps a save to the checkpoints to remove if it succeeds.
        self._notices: list[tuple[Callable[[Any], None], Any]] = []
        self._failed: list[str] = []
        self._is_unfinished: set[str] = set()
        self._links: dict[str, str] = {}  # It maps a link to the unfinished save that it will point to.

    def start(self, trainer: Trainer) -> None:
        """Track the ModelCheckpoints of ``trainer`` and delay the notifications of its loggers until :meth:`close`."""
        self._trainer = trainer
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._records[callback] = _Record(callback)
                _override(callback, "file_exists", partial(self._file_exists, callback.file_exists))
                _override(callback, _compat.LINK_CHECKPOINT, self._link)
        self._loggers = list(trainer.loggers)
        for logger in self._loggers:
            _override(logger, "after_save_checkpoint", partial(self._notify_later, logger.after_save_checkpoint))

    def close(self) -> None:
        """Restore the callbacks' and loggers' own methods, and forget all saves."""
        for callback in self._records:
            _restore(callback, "file_exists")
            _restore(callback, _compat.LINK_CHECKPOINT)
        for logger in self._loggers:
            _restore(logger, "after_save_checkpoint")
        self._trainer, self._records, self._loggers, self._exists = None, {}, [], {}
        self._newest, self._removed_for, self._notices, self._failed = "", {}, [], []
        self._is_unfinished, self._links = set(), {}

    @property
    def wanted(self) -> list[str]:
        """Return the checkpoints that a ModelCheckpoint has among its best ones or as its last one."""
        paths = [path for callback in self._records for path in [*callback.best_k_models, callback.last_model_path]]
        return [absolute(path) for path in [*paths, *(callback.best_model_path for callback in self._records)] if path]

    def asked_to_save(self, path: str) -> None:
        """Record that a save to ``path`` has begun."""
        self._newest = path
        self._exists[path] = True
        self._is_unfinished.add(path)
        self._removed_for[path] = []
        for record in self._records.values():
            record.record_state(path)

    def asked_to_remove(self, path: str) -> None:
        """Record that ``path`` will be removed if the newest save succeeds."""
        self._exists[path] = False
        if self._newest:
            self._removed_for[self._newest].append(path)

    def saved(self, save: Save) -> None:
        """Record that a save has ended on this rank; if it succeeded, make the links to it and notify the loggers."""
        notices, self._notices = self._notices, []
        self._is_unfinished.discard(save.path)
        due = [link for link, target in self._links.items() if target == save.path]
        for link in due:
            target = self._links.pop(link)
            if save.error is None and self._trainer is not None:
                _make_link(self._trainer, target, link)
        if save.error is not None:
            self._failed.append(save.path)
            return
        for record in self._records.values():
            record.commit(save.path)
        for notify, callback in notices:
            views = [record.committed() for record in self._records.values() if record.callback == callback]
            notify(views[0] if views else callback)

    def roll_back_failed(self) -> list[str]:
        """Roll back the failed saves in all records.

        Returns:
            Paths of the checkpoints that then exceed a callback's ``save_top_k``, and must be removed.
        """
        too_many = []
        for path in self._failed:
            self._exists.pop(path, None)
            kept = self._removed_for[path]
            self._exists.update(dict.fromkeys(kept, True))
            for record in self._records.values():
                too_many += record.roll_back(path, kept)
        self._failed = []
        return too_many

    def _file_exists(self, original: Callable[..., bool], filepath: Any, trainer: Trainer) -> bool:
        on_disk = original(filepath, trainer)  # This is a collective, so every rank calls it in any case.
        return self._exists.get(absolute(filepath), on_disk)

    def _link(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Link ``linkpath`` to a checkpoint for ``save_last="link"``, now or once its save has ended."""
        target, link = absolute(filepath), absolute(linkpath)
        if target == link:
            return
        self._links.pop(link, None)
        if target in self._is_unfinished:
            self._links[link] = target
        else:
            _make_link(trainer, target, link)

    def _notify_later(self, original: Callable[[Any], None], checkpoint_callback: Any) -> None:
        self._notices.append((original, checkpoint_callback))


class _Record:
    """Remember the scores and committed paths of one ModelCheckpoint, which itself forgets them."""

    def __init__(self, callback: ModelCheckpoint) -> None:
        self.callback = callback
        self._scores: dict[str, Tensor] = dict(callback.best_k_models)
        self._committed = {name: getattr(callback, name) for name in ("best_model_path", "last_model_path")}
        self._good = {absolute(path) for path in callback.best_k_models}
        # _named maps a save to the attributes set to its path, and their values. _before maps the newest commit to
        # those attributes' values before it.
        self._named: dict[str, dict[str, str]] = {}
        self._before: dict[str, dict[str, str]] = {}

    def record_state(self, path: str) -> None:
        """Record the callback's scores, and which of its attributes name the save to ``path`` that has begun."""
        self._scores |= self.callback.best_k_models
        values = {name: getattr(self.callback, name) for name in self._committed}
        self._named[path] = {name: value for name, value in values.items() if value and absolute(value) == path}

    def commit(self, path: str) -> None:
        """Record that the save to ``path`` succeeded."""
        self._good.add(path)
        named = self._named.pop(path, {})
        self._before = {path: {name: self._committed[name] for name in named}}
        self._committed |= named

    def committed(self) -> ModelCheckpoint:
        """Return a copy of the callback that names only committed checkpoints, and no save that is still under way."""
        view = copy.copy(self.callback)
        view.best_k_models = {path: score for path, score in view.best_k_models.items() if absolute(path) in self._good}
        for name, path in self._committed.items():
            setattr(view, name, path)
        return view

    def roll_back(self, path: str, kept: list[str]) -> list[str]:
        """Remove the failed save to ``path`` from the callback's attributes.

        Args:
            path: Path of the failed save.
            kept: Paths of the checkpoints that were to be removed after it, and are kept now.

        Returns:
            Paths of the checkpoints that now exceed ``save_top_k``.
        """
        callback, too_many = self.callback, []
        self._good.discard(path)
        self._committed |= self._before.pop(path, {})  # The save may be committed already, but not have read back.
        for name, before in self._committed.items():
            value = getattr(callback, name)
            if value and absolute(value) == path:
                setattr(callback, name, before)
        spelled = {absolute(key): key for key in self._scores}
        models = callback.best_k_models
        if callback.monitor is None or path not in spelled:
            return []
        models.pop(spelled[path], None)
        models.update({spelled[old]: self._scores[spelled[old]] for old in kept if old in spelled})
        best, worst = (min, max) if callback.mode == "min" else (max, min)
        while len(models) > callback.save_top_k > 0:
            too_many.append(worst(models, key=models.__getitem__))
            models.pop(too_many[-1])
        if models:
            callback.best_model_path = best(models, key=models.__getitem__)
            callback.best_model_score = models[callback.best_model_path]
        else:
            callback.best_model_path, callback.best_model_score = "", None
        is_full = len(models) == callback.save_top_k
        callback.kth_best_model_path = worst(models, key=models.__getitem__) if is_full else ""
        if is_full:
            callback.kth_value = models[callback.kth_best_model_path]
        return too_many


def _make_link(trainer: Trainer, target: str, link: str) -> None:
    """Make ``link`` a symbolic link to ``target`` on rank 0, replacing whatever is there."""
    if not trainer.is_global_zero:
        return
    if os.path.isdir(link) and not os.path.islink(link):
        shutil.rmtree(link)
    made = f"{link}.new"
    if os.path.lexists(made):  # An earlier process was killed between the next two lines.
        os.unlink(made)
    os.symlink(os.path.relpath(target, os.path.dirname(link)), made)
    os.replace(made, link)


def _override(instance: Any, name: str, function: Callable[..., Any]) -> None:
    instance.__dict__[name] = function


def _restore(instance: Any, name: str) -> None:
    instance.__dict__.pop(name, None)
