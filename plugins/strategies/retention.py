"""Which of a run's checkpoints stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Retention"]


class Retention:
    """Adds to what callbacks keep, and thins out what they would keep for ever.

    Args:
        keep_last: How many of the newest stay, also of those that a callback no longer wants. Older ones go, unless a
            callback has them among its best or calls them its last. None: the callbacks alone decide.
        keep_every_n_steps: Checkpoints at a multiple of so many steps stay in any case. None: none does.

    Raises:
        ValueError: If a number is less than 1.
    """

    def __init__(self, keep_last: int | None = None, keep_every_n_steps: int | None = None) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every_n_steps", keep_every_n_steps)):
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{name}={value} must be at least 1, or None.")
        self._keep_last = keep_last
        self._every = keep_every_n_steps
        self._steps: dict[str, int] = {}  # by path, the oldest first
        self._removed_for: dict[str, dict[str, int]] = {}

    @property
    def is_on(self) -> bool:
        """Whether it changes what callbacks do."""
        return self._keep_last is not None or self._every is not None

    def found(self, steps: Mapping[str, int]) -> None:
        """There are checkpoints of this run from before; the oldest first."""
        self._steps = {**steps, **self._steps}

    def asked_to_save(self, path: str, step: int) -> None:
        """A checkpoint is being saved; where one was at ``path``, it is no more."""
        self._steps.pop(path, None)
        self._steps[path] = step
        self._removed_for = {path: {}}

    def asked_to_remove(self, path: str) -> None:
        """A checkpoint goes, if the newest save succeeds."""
        if path in self._steps:
            for removed in self._removed_for.values():
                removed[path] = self._steps[path]
            self._steps.pop(path)

    def failed(self, path: str) -> None:
        """A save failed: what was to go for it is still there."""
        self._steps.pop(path, None)
        self._steps = {**self._removed_for.pop(path, {}), **self._steps}

    def keeps(self, path: str) -> bool:
        """Whether it stays, though a callback no longer wants it."""
        if path not in self._steps:
            return False
        is_milestone = self._every is not None and self._steps[path] % self._every == 0
        return is_milestone or (self._keep_last is not None and path in list(self._steps)[-self._keep_last :])

    def surplus(self, wanted: Iterable[str]) -> list[str]:
        """What is to go, where callbacks want only these."""
        if self._keep_last is None:
            return []
        kept = set(wanted)
        return [path for path in self._steps if path not in kept and not self.keeps(path)]
