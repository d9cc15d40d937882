"""Define the interface of callbacks that act before a run's processes communicate."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer

__all__ = ["BeforeProcesses"]


@runtime_checkable
class BeforeProcesses(Protocol):
    """Act while this process can still be forked, because it has neither a process group nor threads of one."""

    def before_processes(self, trainer: Trainer) -> None:
        """Act on this rank before the processes of a run communicate. It must not raise on some ranks only.

        Args:
            trainer: The Trainer, which knows its module and its strategy.
        """
