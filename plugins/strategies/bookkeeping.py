"""What Lightning believes of checkpoints, kept to what was committed.

ModelCheckpoint takes a save to be done when it was asked for: it forgets and removes the checkpoint before, tells
loggers of a directory that is not there yet, and gives two of them one name. With saves in the background that would be
wrong, so here its instances, and the loggers, are told the truth.
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
    """A path as any process can use it, whatever folder it works in; URLs stay."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


class Bookkeeping:
    """Of one fit at a time. All methods are called by all ranks alike, with absolute paths."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._of: dict[ModelCheckpoint, _Known] = {}
        self._loggers: list[Logger] = []
        self._exists: dict[str, bool] = {}
        self._newest = ""
        self._removed_for: dict[str, list[str]] = {}  # save to what was to be removed after it
        self._notices: list[tuple[Callable[[Any], None], Any]] = []
        self._failed: list[str] = []
        self._is_unfinished: set[str] = set()
        self._links: dict[str, str] = {}  # from where to which save, once it is there

    def start(self, trainer: Trainer) -> None:
        """Look after the callbacks and loggers of ``trainer``."""
        self._trainer = trainer
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._of[callback] = _Known(callback)
                _override(callback, "file_exists", partial(self._file_exists, callback.file_exists))
                _override(callback, _compat.LINK_CHECKPOINT, self._link)
        self._loggers = list(trainer.loggers)
        for logger in self._loggers:
            _override(logger, "after_save_checkpoint", partial(self._notify_later, logger.after_save_checkpoint))

    def close(self) -> None:
        """Leave them as they were."""
        for callback in self._of:
            _restore(callback, "file_exists")
            _restore(callback, _compat.LINK_CHECKPOINT)
        for logger in self._loggers:
            _restore(logger, "after_save_checkpoint")
        self._trainer, self._of, self._loggers, self._exists = None, {}, [], {}
        self._newest, self._removed_for, self._notices, self._failed = "", {}, [], []
        self._is_unfinished, self._links = set(), {}

    @property
    def wanted(self) -> list[str]:
        """What the callbacks have among their best, or call their last."""
        paths = [path for callback in self._of for path in [*callback.best_k_models, callback.last_model_path]]
        return [absolute(path) for path in [*paths, *(callback.best_model_path for callback in self._of)] if path]

    def asked_to_save(self, path: str) -> None:
        """A save of ``path`` has begun."""
        self._newest = path
        self._exists[path] = True
        self._is_unfinished.add(path)
        self._removed_for[path] = []
        for known in self._of.values():
            known.look(path)

    def asked_to_remove(self, path: str) -> None:
        """``path`` is to be removed, if the newest save succeeds."""
        self._exists[path] = False
        if self._newest:
            self._removed_for[self._newest].append(path)

    def saved(self, save: Save) -> None:
        """A save has ended, on this rank: tell loggers."""
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
        for known in self._of.values():
            known.commit(save.path)
        for notify, callback in notices:
            views = [known.committed() for known in self._of.values() if known.callback == callback]
            notify(views[0] if views else callback)

    def settle(self) -> list[str]:
        """Take back what failed; returns what is too many now, and to be removed."""
        too_many = []
        for path in self._failed:
            self._exists.pop(path, None)
            kept = self._removed_for[path]
            self._exists.update(dict.fromkeys(kept, True))
            for known in self._of.values():
                too_many += known.roll_back(path, kept)
        self._failed = []
        return too_many

    def _file_exists(self, original: Callable[..., bool], filepath: Any, trainer: Trainer) -> bool:
        on_disk = original(filepath, trainer)  # a collective: to be called in any case
        return self._exists.get(absolute(filepath), on_disk)

    def _link(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Let ``linkpath`` lead to a checkpoint, as ``save_last="link"`` asks for, when it is there."""
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


class _Known:
    """What a ModelCheckpoint knew, and would forget."""

    def __init__(self, callback: ModelCheckpoint) -> None:
        self.callback = callback
        self._scores: dict[str, Tensor] = dict(callback.best_k_models)
        self._committed = {name: getattr(callback, name) for name in ("best_model_path", "last_model_path")}
        self._good = {absolute(path) for path in callback.best_k_models}
        self._named: dict[str, dict[str, str]] = {}  # save to the attributes that got its path, as they spell it
        self._before: dict[str, dict[str, str]] = {}  # the newest save to what they were committed to before it

    def look(self, path: str) -> None:
        self._scores |= self.callback.best_k_models
        values = {name: getattr(self.callback, name) for name in self._committed}
        self._named[path] = {name: value for name, value in values.items() if value and absolute(value) == path}

    def commit(self, path: str) -> None:
        self._good.add(path)
        named = self._named.pop(path, {})
        self._before = {path: {name: self._committed[name] for name in named}}
        self._committed |= named

    def committed(self) -> ModelCheckpoint:
        """The callback without the save that it may have been asked for by now, and knows by its name already."""
        view = copy.copy(self.callback)
        view.best_k_models = {path: score for path, score in view.best_k_models.items() if absolute(path) in self._good}
        for name, path in self._committed.items():
            setattr(view, name, path)
        return view

    def roll_back(self, path: str, kept: list[str]) -> list[str]:
        callback, too_many = self.callback, []
        self._good.discard(path)
        self._committed |= self._before.pop(path, {})  # it was committed, and did not read back
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
    """Let ``link`` lead to ``target``, whatever was there; on rank 0."""
    if not trainer.is_global_zero:
        return
    if os.path.isdir(link) and not os.path.islink(link):
        shutil.rmtree(link)
    made = f"{link}.new"
    os.symlink(os.path.relpath(target, os.path.dirname(link)), made)
    os.replace(made, link)


def _override(instance: Any, name: str, function: Callable[..., Any]) -> None:
    instance.__dict__[name] = function


def _restore(instance: Any, name: str) -> None:
    instance.__dict__.pop(name, None)
