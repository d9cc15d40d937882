"""Decide which of a run's checkpoints are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Retention"]


class Retention:
    """Keep checkpoints that callbacks would remove, and remove those that they would keep forever.

    Args:
        keep_last: Number of the newest checkpoints that are kept, even if no callback wants them any more. Older
            ones are removed, unless a callback has them among its best ones or as its last one. None: the callbacks
            alone decide.
        keep_every_n_steps: Checkpoints at a multiple of this number of optimizer steps are always kept. None: no
            checkpoint is kept for its step.

    Raises:
        ValueError: If a number is less than 1.
    """

    def __init__(self, keep_last: int | None = None, keep_every_n_steps: int | None = None) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every_n_steps", keep_every_n_steps)):
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{name}={value} must be at least 1, or None.")
        self._keep_last = keep_last
        self._every = keep_every_n_steps
        self._steps: dict[str, int] = {}  # It maps paths to optimizer steps, with the oldest checkpoint first.
        self._removed_for: dict[str, dict[str, int]] = {}

    @property
    def is_on(self) -> bool:
        """Return whether a limit is set, so that the retention differs from that of the callbacks."""
        return self._keep_last is not None or self._every is not None

    def found(self, steps: Mapping[str, int]) -> None:
        """Record checkpoints that this run saved before it was resumed.

        Args:
            steps: The optimizer steps of the checkpoints by path, the oldest first.
        """
        self._steps = {**steps, **self._steps}

    def asked_to_save(self, path: str, step: int) -> None:
        """Record that a checkpoint of ``step`` is being saved to ``path``, where it replaces any previous one."""
        self._steps.pop(path, None)
        self._steps[path] = step
        self._removed_for = {path: {}}

    def asked_to_remove(self, path: str) -> None:
        """Record that a checkpoint will be removed if the newest save succeeds."""
        if path in self._steps:
            for removed in self._removed_for.values():
                removed[path] = self._steps[path]
            self._steps.pop(path)

    def failed(self, path: str) -> None:
        """Record that a save failed, so that the checkpoints to be removed after it still exist."""
        self._steps.pop(path, None)
        self._steps = {**self._removed_for.pop(path, {}), **self._steps}

    def keeps(self, path: str) -> bool:
        """Return whether the checkpoint at ``path`` is kept even if no callback wants it any more."""
        if path not in self._steps:
            return False
        is_milestone = self._every is not None and self._steps[path] % self._every == 0
        return is_milestone or (self._keep_last is not None and path in list(self._steps)[-self._keep_last :])

    def surplus(self, wanted: Iterable[str]) -> list[str]:
        """Return the checkpoints to remove, given the paths of those that callbacks want."""
        if self._keep_last is None:
            return []
        kept = set(wanted)
        return [path for path in self._steps if path not in kept and not self.keeps(path)]
